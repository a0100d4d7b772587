"""Adapters: they serve the engine's encoders and decoders as workers of the mesh."""
