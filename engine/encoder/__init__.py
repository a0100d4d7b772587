"""The encoder engine: batches of embeddings and scores, their limits and their cost."""
