"""The `spillway` command: start and stop an instance, fill it, search it, look after it."""
