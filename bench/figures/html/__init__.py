"""Reports of benchmark rows as HTML pages with plots."""
