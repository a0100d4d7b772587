"""Records that the mesh keeps in Redis, one file a noun: API keys, models, sessions, requests, quotas."""
