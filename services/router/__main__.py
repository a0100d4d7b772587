"""Start the router: `python -m services.router --data-dir DIR [--instance NAME] [--config FILE]`."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Parse, build, run."""
    from common import lifecycle, log, tracing  # noqa: PLC0415 - text processes import this module and need none of it
    from common.arguments import parse  # noqa: PLC0415
    from common.config import RouterConfig  # noqa: PLC0415
    from services.router.service import serve  # noqa: PLC0415

    config, instance = parse(RouterConfig, sys.argv[1:], os.environ)
    log.setup("router", config)
    tracing.setup("router", os.environ)
    return lifecycle.run(lambda stopping: serve(config, instance, stopping), config.drain_s)


if __name__ == "__main__":
    sys.exit(main())
