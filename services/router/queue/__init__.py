"""How requests become jobs, and how requests of several jobs are driven."""
