"""What a change of the house must leave as it was: recorded answers, an old data directory, lists of names."""
