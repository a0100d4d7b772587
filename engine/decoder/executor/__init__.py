"""Executors, which compute the steps that the scheduler plans: torch, compiled kernels, and the sim device."""
