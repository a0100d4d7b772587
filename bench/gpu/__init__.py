"""Checks on an accelerator, run by hand: each is a script that writes JSON."""
