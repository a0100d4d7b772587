"""The cpu_worker: embeddings of the CPU lane (role overflow), or attention on the host for a gpu_worker (role host)."""
