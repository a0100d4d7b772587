"""How long will it take: the one place for cost models."""
