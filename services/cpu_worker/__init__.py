"""Host compute: with role overflow, embeddings of the CPU lane, by the same encoder."""
