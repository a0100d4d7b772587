"""Eviction."""
