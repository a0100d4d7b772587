"""Load on a running mesh by its URL: arrivals, requests, statistics, reports. It imports no service."""
