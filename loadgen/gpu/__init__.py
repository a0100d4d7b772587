"""Checks that need an accelerator, one script each; rehearsed on the CPU with `--tiny`."""
