"""Supervision."""
