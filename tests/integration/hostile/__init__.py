"""Hostile."""
