"""Decoder language models over paged KV: configuration, weights, attention, forward pass."""
