"""Schedulers and eviction policies on a virtual clock: replays without a model."""
