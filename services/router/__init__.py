"""The HTTP API: admission, choice of lane, requests of several jobs; it loads none of the heavy libraries."""
