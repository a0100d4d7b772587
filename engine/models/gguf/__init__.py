"""Models in GGUF files: header, configuration, tokenizer and weights, as a Hugging Face directory would have them."""
