"""Integration."""
