"""Attention of a part of the running sequences on the host (NEO): costs of a step's stages, and plans of steps."""
