"""Attention on the host by a helper: a process of its own that attends to the pages of a gpu_worker beside it."""
