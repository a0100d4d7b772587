"""Readers of documents: each turns one format into text, in a process of their own (`cli/reading_process.py`)."""
