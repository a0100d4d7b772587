"""Eviction policies: the choice of KV pages to drop from a full tier."""
