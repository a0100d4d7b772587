"""The tiers of KV pages below the workers: room in Redis, pins, limits, and where pages lie."""
