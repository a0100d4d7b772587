"""Sessions as kv_store serves them: listed, exported, imported, pinned, deleted."""
