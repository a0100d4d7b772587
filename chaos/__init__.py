"""Fault runs: processes are killed, stopped or drained under load, and every promise is checked."""
