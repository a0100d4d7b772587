"""Shared foundation of every process; imports no service and no engine, and loads no torch."""
