"""HTTP handlers, one noun a file."""
