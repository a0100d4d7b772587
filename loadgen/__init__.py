"""Load on a running mesh by its URL: arrivals, requests, statistics, reports. Knows no service of this checkout."""
