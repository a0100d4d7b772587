"""The cpu_worker: the embeddings of the CPU lane (role overflow), by the same encoder as the accelerator's."""
