"""Reports of load runs as HTML pages with plots."""
