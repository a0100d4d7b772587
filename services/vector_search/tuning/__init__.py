"""The tuning of a collection's index: explore settings, predict what they do, and choose the best for a goal."""
