"""Models in our own code: encoders and cross-encoders of the BERT and XLM-R families. Importing this loads no torch."""
