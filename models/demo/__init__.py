"""The small chat model that answers from given passages, and everything that makes and measures it."""
