"""Deleting sessions and all that they left, with a proof."""
