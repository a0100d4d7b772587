"""kv_store: listing, export, import, deletion and expiry of sessions, and the tiers of KV pages below the workers."""
