"""The in-memory index of one shard: rows of vectors, searched exactly or through a graph."""
