"""Encoder models of the BERT and XLM-R families: embeddings and cross-encoders."""
