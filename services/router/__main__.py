"""Start the router: `python -m services.router --data-dir DIR [--instance NAME] [--config FILE]`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the router with the command line's arguments; return the exit status."""
    from common.config import RouterConfig  # noqa: PLC0415 - text processes import this module and need none of it
    from common.lifecycle import run_service  # noqa: PLC0415
    from services.router.service import serve  # noqa: PLC0415

    return run_service(RouterConfig, "router", serve, "spillway router")


if __name__ == "__main__":
    sys.exit(main())
