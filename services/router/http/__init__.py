"""The router's HTTP: one file a group of routes, middlewares, streams and replies."""
