"""Kv store."""
