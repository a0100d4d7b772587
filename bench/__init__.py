"""Benchmarks of a checkout: `spillway bench ID` runs one row of docs/benchmarks.md.

- `suites/`: one file a row, named after the row's id; `suite.py` lists them
- `gpu/`: checks on an accelerator, run by hand; each writes JSON
- `rivals/`: the systems that rows compare with, each in its own environment
- `figures/`: the summary of targets, and the plots of the HTML reports
- `workloads/`: what rows send: conversations, event streams, vectors, pages
- `engine/`: the engine driven without a bus, and as a process beside rivals
- `simulation/`: schedulers and eviction policies on a virtual clock
- `mesh/`: services of this checkout as local processes, for rows and fault runs
- `partial.py`: what a long row has measured so far, so that it resumes
- `document.py`, `report.py`: the JSON of a run, and the tables of docs/benchmarks.md made from it
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
