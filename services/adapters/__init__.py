"""Adapters between engine and bus: serve the engine's encoders and decoders as workers of the mesh."""
