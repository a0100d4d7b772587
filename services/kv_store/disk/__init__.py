"""The disk tier of KV pages: segment files, their records, and the pages in them."""
