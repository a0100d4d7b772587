"""Collections of vectors and documents: durable, searched by graph or exactly, filtered without loss."""
