"""Tests of what a process does with entries that nobody can read, and with tasks that end."""
