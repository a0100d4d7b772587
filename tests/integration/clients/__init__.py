"""The matrix of clients."""
