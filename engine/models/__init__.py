"""Models by architecture: configuration, weights, forward pass."""
