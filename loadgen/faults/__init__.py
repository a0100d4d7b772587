"""Fault runs: processes are killed under load, and every accepted request is checked."""
