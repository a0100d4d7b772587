"""The disk tier of KV pages."""
