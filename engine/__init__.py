"""Models, kernels and engines of encoders and decoders, as a library without Redis; importing it loads no torch."""

from __future__ import annotations

import os

# OpenMP's threads spin while they wait. Where several processes share the cores (both lanes, the router, Redis), a
# spinning thread keeps the one it waits for from running, and a batch takes up to ten times as long; so they spin
# for microseconds only. Read once, when torch's OpenMP loads, which is after this.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"
