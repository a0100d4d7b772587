"""kv_store: the cold life of sessions: list, export, import, delete with proof, and the sweep of what has expired."""
