"""KV pages as all services know them: their ids and keys, their encoding, and the client of the pages Redis."""
