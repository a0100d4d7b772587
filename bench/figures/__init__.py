"""The summary of targets in docs/benchmarks.md, and the plots of reports."""
