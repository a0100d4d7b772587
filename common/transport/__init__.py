"""Bytes between two processes that know each other by the registry, past Redis."""
