"""The paged KV cache of the decoder: pages, tables, prefixes, tiers, prefetch and write-back."""
