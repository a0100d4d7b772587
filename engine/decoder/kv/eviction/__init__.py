"""Eviction policies: which KV pages leave a tier that is full."""
