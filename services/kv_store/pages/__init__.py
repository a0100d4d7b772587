"""The tiers of KV pages below the workers: room in Redis, pins, limits, and the locations of pages."""
