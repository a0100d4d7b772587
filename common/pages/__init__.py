"""KV pages as all services share them: ids, keys, encoding, and the client of the pages Redis."""
