"""Executors: they compute the steps that the scheduler plans."""
