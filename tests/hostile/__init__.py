"""Hostile input: every kind, everywhere it can reach; a clear error each time, and nothing else disturbed."""
