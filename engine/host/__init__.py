"""Attention on the host by a helper: a separate process that attends to a gpu_worker's pages."""
