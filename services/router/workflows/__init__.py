"""Workflows: requests of several jobs, run by the router that leases them."""
