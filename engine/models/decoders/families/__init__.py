"""The families of generators: each file turns a family's `config.json` into a DecoderSpec, as transformers reads it."""
