"""Load, benchmark suites and fault runs: what judges the mesh from outside, over its API."""
