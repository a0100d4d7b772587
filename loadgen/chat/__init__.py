"""Chat as load: conversations, a streaming client that survives a dropped connection, and what their figures mean."""
