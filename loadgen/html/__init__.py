"""Reports for people: one self-contained HTML file, tables beside plots."""
