"""`python -m loadgen --url ... --mode open --rate 100 --kind embed --seconds 30 --json FILE`."""

from __future__ import annotations

import sys

from loadgen.command import main

if __name__ == "__main__":
    sys.exit(main())
