"""Models, kernels and engines of encoders and decoders, as a library without Redis; importing it loads no torch."""

from __future__ import annotations

import os

# OpenMP's threads spin while they wait. Where several processes share the cores (both lanes, the router, Redis), a
# spinning thread keeps the thread that it waits for off the core, and a batch takes up to ten times as long. So threads
# spin for microseconds only. OpenMP reads this setting once, when torch loads it, which is later than this line.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"
