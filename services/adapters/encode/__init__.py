"""The worker of embeddings and scores: jobs of the bus become batches of the encoder."""
