"""Deletion of sessions and of all their data, with a proof."""
