"""Chat load: scripts of conversations, streamed answers and their statistics."""
