"""Transport of bytes between two processes, past Redis; they find each other by the registry."""
