"""The router's HTTP: one file per group of routes, and middlewares, streams and replies."""
