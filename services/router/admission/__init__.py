"""Admission of requests and of the jobs of workflows to lanes."""
