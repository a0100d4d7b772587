"""Vector search."""
