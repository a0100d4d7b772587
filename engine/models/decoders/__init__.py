"""Decoder models: their configuration, weights and forward pass on torch and on the compiled kernels."""
