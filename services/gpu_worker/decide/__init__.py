"""Decisions of the engine: sequences, pages, schedules. Plain Python, no tensors."""
