"""Computation of the engine: the runner and what it draws tokens with. The only room here that imports torch."""
