"""The engine's process: generation, embeddings and rerank on the accelerator's lane."""
