"""The `spillway` command: starts, stops, fills, searches and maintains an instance."""
