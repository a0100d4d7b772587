"""Decoder models: Llama, Qwen2, Qwen3 and Mistral."""
