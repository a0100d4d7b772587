"""Cost models: predicted seconds of a step or a batch, fitted to measurements."""
