"""The small model that reads retrieved chunks through cross-attention, and everything that makes and measures it."""
