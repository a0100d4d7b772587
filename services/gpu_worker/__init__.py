"""The engine's process: here, embeddings and rerank on the accelerator's lane."""
