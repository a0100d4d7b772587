"""`python -m loadgen`: load on a running mesh from the command line, with live progress and JSON out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen import arrivals, bodies
from loadgen.chat import cli as chat
from loadgen.driving import driven
from loadgen.html.page import can_plot
from loadgen.load import LoadRun, RequestRun, Sample
from loadgen.target import Target


def seconds(text: str) -> float:
    """Parse a duration: `1s`, `500ms`, `2m` or plain seconds; ValueError otherwise."""
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}
    number = text.rstrip("ms")
    return float(number) * units[text[len(number) :]]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the load's options on `parser`."""
    add = parser.add_argument
    add("--url", action="append", help="a router's address; repeat for several")
    add("--key", default=os.environ.get("SPILLWAY_API_KEY", ""), help="API key")
    add("--mode", choices=("open", "closed"), default="open")
    add("--rate", type=float, default=10.0, help="requests a second (open loop)")
    add("--arrivals", choices=("poisson", "bursty", "steady", "trace"), default="poisson")
    add("--burst", type=float, default=4.0, help="how many times the rate a burst has")
    add("--trace", type=Path, help="JSONL with a timestamp a line")
    add("--clients", type=int, default=8, help="requests kept open (closed loop)")
    add("--kind", choices=("embed", "search", "search-text", *chat.KINDS), default="embed")
    add("--model", default="", help="model; default: the mesh's")
    add("--texts", type=int, default=1, help="texts, or queries, a request")
    add("--tokens", type=int, default=32, help="tokens a text")
    add("--collection", default="docs", help="collection of search")
    add("--dimension", type=int, default=384, help="dimension of search by vector")
    add("-k", type=int, default=10, help="hits a query")
    add("--seconds", type=float, default=30.0)
    add("--timeout", type=seconds, default=60.0, help="give up on an answer after this")
    add("--slo", type=seconds, default=1.0, help="answers within this count as goodput")
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="write summary and raw samples here")
    add("--html", type=Path, help="write a report with plots here (needs matplotlib)")
    chat.arguments(parser, seconds)


def requests(options: argparse.Namespace) -> list[bodies.Request]:
    """Build the request bodies of the options."""
    if options.kind == "embed":
        return bodies.embed(options.texts, options.tokens, seed=options.seed, model=options.model)
    if options.kind == "search-text":
        return bodies.search_text(
            options.collection, options.tokens, seed=options.seed, k=options.k
        )
    rng = np.random.default_rng(options.seed)
    rows = rng.standard_normal((64 * options.texts, options.dimension), dtype=np.float32)
    return bodies.search(options.collection, rows, queries=options.texts, k=options.k)


def routers(options: argparse.Namespace) -> list[str]:
    """Return the routers' addresses."""
    return options.url or [os.environ.get("SPILLWAY_URL", "http://127.0.0.1:8080")]


async def drive(options: argparse.Namespace) -> RequestRun:
    """Run the loop of the options, and print a line a second on standard error."""
    async with Target(routers(options), key=options.key, timeout_s=options.timeout) as target:
        load = LoadRun(target, requests(options))

        def told(fresh: Sequence[Sample]) -> tuple[dict[str, Any], str]:
            part = RequestRun(list(fresh), 1.0).summary(options.slo)
            latency = part["latency_s"]
            if not latency:
                return part, ""
            return part, f"  p50 {latency['p50'] * 1e3:.1f} ms  p99 {latency['p99'] * 1e3:.1f} ms"

        return await driven(load, options, lambda: load.samples, told)


def report(summary: dict[str, Any]) -> str:
    """Return the summary as lines for people."""
    latency = summary["latency_s"]
    s = summary
    lines = [
        "requests {requests}  ok {ok}  refused {refused}  errors {errors}".format(**s),
        "rate {requests_per_s:.1f} requests/s  {items_per_s:.1f} items/s".format(**s),
        "goodput at {slo_s:g} s: {goodput_per_s:.1f}/s".format(**s),
        "load generator: {loadgen_cpu_s:.2f} CPU s in {seconds:.1f} s".format(**s),
    ]
    lines += [f"  {code}: {count}" for code, count in sorted(s["codes"].items())]
    if latency:
        part = "  ".join(f"{name} {value * 1e3:.2f} ms" for name, value in latency.items())
        lines.insert(1, f"latency {part}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 if any request was answered well, else 1."""
    parser = argparse.ArgumentParser("python -m loadgen", description=__doc__)
    arguments(parser)
    given = sys.argv[1:] if argv is None else list(argv)
    options = parser.parse_args(given)
    if options.html and not can_plot():
        return 2
    try:
        import uvloop  # noqa: PLC0415 - optional where there is no wheel

        if options.kind in chat.KINDS:
            return chat.finish(options, uvloop.run(chat.drive(options, routers(options))), given)
        run = uvloop.run(drive(options))
    except KeyboardInterrupt:
        return 130
    except arrivals.TraceError as error:
        print(error, file=sys.stderr)
        return 2
    summary = run.summary(options.slo)
    print(report(summary))
    if options.json:
        raw = [_row(sample) for sample in run.samples]
        options.json.write_bytes(msgspec.json.encode({"summary": summary, "samples": raw}))
    if options.html:
        from loadgen.html import runs  # noqa: PLC0415 - only reports need what plots need

        runs.load_page(run, options.slo, runs.About.now(given)).save(options.html)
    return 0 if summary["ok"] else 1


def _row(sample: Any) -> list[Any]:
    return [sample.due_s, sample.sent_s, sample.done_s, sample.status, sample.code, sample.items]
