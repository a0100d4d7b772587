"""The mesh as this router sees it: lanes, workers, readiness, and the last minutes."""
