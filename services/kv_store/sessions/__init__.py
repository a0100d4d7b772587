"""Sessions in kv_store: list, export, import, pin, delete."""
