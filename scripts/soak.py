"""`make soak`: the long runs of the property, fault and conformance tests, in pieces that resume.

Every test file is one piece; a piece that has passed at this commit is not run again. State and results are in
.soak/, from which `docs/benchmarks.md` is made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".soak"
PIECE_TIMEOUT_S = 6 * 3600


def pieces() -> dict[str, str]:
    """Return every piece's name and path: `bus/model` is tests/bus/test_model.py."""
    found = {}
    for root in (ROOT / "tests", ROOT / "client" / "tests"):
        for path in sorted(root.rglob("test_*.py")):
            inner = path.relative_to(root).with_suffix("").as_posix()
            name = (
                inner.replace("test_", "", 1) if "/" not in inner else inner.replace("/test_", "/")
            )
            prefix = "client/" if root.parent.name == "client" else ""
            found[f"{prefix}{name}"] = str(path.relative_to(ROOT))
    return found


def _git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False).stdout


def commit() -> str:
    """Return the checkout's commit; with changes that are not committed, also their hash."""
    name = _git("rev-parse", "--short=12", "HEAD").decode().strip() or "unknown"
    changes = _git("diff", "HEAD")
    return f"{name}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else name


def read_state() -> dict[str, Any]:
    """Return what earlier runs have noted."""
    try:
        state = json.loads((PLACE / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def write(name: str, value: Any) -> None:
    """Write one JSON file into .soak, whole or not at all."""
    path = PLACE / f"{name}.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)


def run(name: str, path: str, seed: int, extra: list[str]) -> dict[str, Any]:
    """Run one piece and return its result."""
    report = PLACE / f"{name.replace('/', '-')}.xml"
    env = {**os.environ, "SPILLWAY_PROFILE": "soak", "SPILLWAY_SEED": str(seed)}
    words = [sys.executable, "-m", "pytest", path, f"--junitxml={report}", "--timeout=0", *extra]
    began = time.monotonic()
    try:
        status = subprocess.run(
            words, cwd=ROOT, env=env, timeout=PIECE_TIMEOUT_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        status = 124
    result: dict[str, Any] = {
        "piece": name,
        "path": path,
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "seed": seed,
        "commit": commit(),
    }
    if report.exists():
        suite = ET.parse(report).getroot().find("testsuite")  # noqa: S314 - pytest's own report
        if suite is not None:
            result |= {
                key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")
            }
    return result


def main() -> int:
    """Run the pieces asked for, or all; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", help="pieces, or their directories; none: all")
    parser.add_argument("--list", action="store_true", help="show the pieces and how they stand")
    parser.add_argument("--again", action="store_true", help="also what has passed at this commit")
    args, extra = parser.parse_known_args()
    PLACE.mkdir(exist_ok=True)
    state, known, here = read_state(), pieces(), commit()
    chosen = [
        n for n in known if not args.name or any(n == a or n.startswith(f"{a}/") for a in args.name)
    ]
    if not chosen:
        sys.stderr.write(
            f"soak: no piece {' '.join(args.name)!r}; `make soak ARGS=--list` shows them\n"
        )
        return 2
    failed = []
    for name in chosen:
        last = state.get(name, {})
        passed = last.get("status") == 0 and last.get("commit") == here
        if args.list:
            told = (
                f"{last['status']} at {last['commit']}, {last['seconds']} s"
                if last
                else "never run"
            )
            print(f"{name:<40} {told}")
        elif passed and not args.again:
            print(f"soak: {name} has passed at {here}")
        else:
            print(f"soak: {name}", flush=True)
            seed = int(os.environ.get("SPILLWAY_SEED") or random.SystemRandom().randint(1, 2**31))
            result = run(name, known[name], seed, extra)
            state = {**read_state(), name: result}
            write("state", state)
            write(name.replace("/", "-"), result)
            if result["status"] not in {0, 5}:  # 5: the file holds no test
                failed.append(f"{name} (SPILLWAY_SEED={seed})")
    if failed:
        print(f"soak: failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
