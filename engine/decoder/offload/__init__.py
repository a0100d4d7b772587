"""Offload of some running sequences' attention to the host (NEO): costs of a step's stages, and plans of steps."""
