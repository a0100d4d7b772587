"""Parsing, tokenizing and chunking: pure functions that run in a small pool of processes."""
