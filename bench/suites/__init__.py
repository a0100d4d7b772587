"""One file a row of docs/benchmarks.md, named after the row's id; each has `run(options)`."""
