"""Executors, which compute the steps that the scheduler plans: for loaded models, and for the sim device."""
