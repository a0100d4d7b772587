"""A small decoder that reads retrieved chunks through cross-attention, as RETRO does: network, database, generation."""
