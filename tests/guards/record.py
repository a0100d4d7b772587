"""Records the transcripts of every route: `python -m tests.guards.record [--checkout PATH]`.

Run it after an intended change of an answer and look at the difference in git before it is committed. With
`--checkout` another tree answers, so that a tree that is known to be right can be the one recorded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.guards import scenario
from tests.guards.checkout import ROOT, Checkout, Instance

PLACE = Path(__file__).parent / "transcripts"
WHOLE = {
    "SPILLWAY_KEYS": "on",
    "SPILLWAY_MAX_BODY_BYTES": "1000000",
    "SPILLWAY_BODY_TIMEOUT_S": "4",
    "SPILLWAY_SESSION_TTL_S": "86400",
}
# Instances without a place for pages below the worker: none is wanted, and the one that is wanted is away.
BARE = {"no tier": "none", "tier away": "unix:///nonexistent/pages.sock"}


def transcripts(checkout: Checkout) -> Iterator[tuple[str, dict[str, Any]]]:
    """Start the instances one after the other and yield each transcript with its name."""
    with tempfile.TemporaryDirectory(prefix="spillway-guard-") as folder:
        yield from play(Instance(checkout, Path(folder) / "whole", **WHOLE), scenario.whole).items()
        for name, url in BARE.items():
            settings = {"SPILLWAY_PAGES_URL": url, "SPILLWAY_EMBED_MODEL": "none"}
            instance = Instance(checkout, Path(folder) / name.replace(" ", "-"), **settings)
            yield name, play(instance, scenario.bare)


def play(instance: Instance, part: Any) -> Any:
    """Return what a part of the scenario says of an instance that lives as long as it does."""
    try:
        return part(instance.start())
    finally:
        instance.kill()


def path_of(name: str) -> Path:
    """Return where a transcript is kept."""
    return PLACE / f"{name.replace(' ', '_')}.json"


def load(name: str) -> dict[str, Any]:
    """Return a transcript as it was recorded."""
    found: dict[str, Any] = json.loads(path_of(name).read_text(encoding="utf-8"))
    return found


def save(name: str, exchanges: dict[str, Any]) -> None:
    """Write a transcript, one exchange a line."""
    lines = (
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"
        for key, value in exchanges.items()
    )
    path_of(name).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    """Record all transcripts anew."""
    parser = argparse.ArgumentParser("python -m tests.guards.record", description=__doc__)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the tree that answers")
    args = parser.parse_args()
    for name, exchanges in transcripts(Checkout(args.checkout)):
        save(name, exchanges)
        print(f"{name}: {len(exchanges)} exchanges")


if __name__ == "__main__":
    main()
