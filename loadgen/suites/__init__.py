"""The benchmark suites, one module a row of the targets, each with `run(options)`."""
