"""The decoder engine: scheduler, executor, KV cache, sampling and output of generation."""
