"""What rows send: conversations, event streams, vectors, pages and grounded questions."""
