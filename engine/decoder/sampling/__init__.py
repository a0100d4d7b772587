"""Sampling of the next token, keyed by seed, choice, position and draw."""
