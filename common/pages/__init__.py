"""KV pages as all services know them: what they are called, how they are written down, what they are worth."""
