"""The hops of a request through a real mesh, stamped on one clock in every process that it passes.

Each hop begins where the one before it ends, so the hops of a request are its whole latency, and their means that of
the whole; the medians add up as far as the hops are alike from request to request.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.mesh.stamped import Moments, read
from loadgen import stats
from loadgen.load import RequestRun

Times = dict[str, list[float]]


class Hop(NamedTuple):
    """A part of the way: its name, what happens there, and the stage with which it ends."""

    name: str
    what: str
    ends: str


WAIT = "wait for the device"
HOPS = (
    Hop("send", "client: request to the socket; router: bytes from the socket", "received"),
    Hop("HTTP", "router: head parsed, route found", "accepted"),
    Hop("parse and tokenize", "router: JSON body, tokenizer, the job's message", "parsed"),
    Hop(
        "admit and deliver",
        "router, Redis, worker: depth checked, job recorded and queued by one script, entry read",
        "leased",
    ),
    Hop(WAIT, "worker: the batch before, where there is one", "free"),
    Hop("begin", "worker: job decoded, batch formed, handed to the device's thread", "begun"),
    Hop("device", "the simulated device", "computed"),
    Hop("end", "worker: from the device's thread to the loop, result encoded", "finishing"),
    Hop(
        "finish and notify",
        "worker, Redis, router: result logged and job ended by one script, notification read",
        "heard",
    ),
    Hop("answer", "router: result to JSON", "answered"),
    Hop("receive", "router: response to the socket; client: response read", "done"),
)


def measure(done: RequestRun, began_s: float, router: Path, worker: Path) -> Times:
    """Return the seconds of every hop for the requests of a run that began at `began_s` by `time.monotonic()`.

    `router` and `worker` are the files of their stamps.
    """
    moments: Moments = read(router) | read(worker)
    for name, of in {"done": "done_s", "sent": "sent_s"}.items():
        moments[name] = {
            sample.request_id: began_s + getattr(sample, of) for sample in done.samples if sample.ok
        }
    moments["free"] = _free(moments)
    times: Times = {hop.name: [] for hop in HOPS}
    for job in moments["done"]:
        at_s = moments["sent"][job]
        for hop in HOPS:
            ends_s = moments[hop.ends][job]
            times[hop.name].append(ends_s - at_s)
            at_s = ends_s
    return times


def _free(moments: Moments) -> dict[str, float]:
    """Return from when on each job need not wait for another batch: its lease, or the end of a batch after that."""
    free: dict[str, float] = {}
    ended_s = before_s = 0.0  # of the batch that began last, and of the one before it
    for job, begun_s in sorted(moments["begun"].items(), key=lambda pair: pair[1]):
        if begun_s >= ended_s:
            before_s = ended_s
        ended_s = max(ended_s, moments["computed"][job])
        free[job] = min(max(moments["leased"][job], before_s), begun_s)
    return free


def rows(times: Times, unstamped_s: Sequence[float]) -> list[list[str]]:
    """Return the table's rows in the order of the path; `unstamped_s` are whole latencies without stamps."""
    found = []
    for hop in HOPS:
        p, part = stats.percentiles(times[hop.name]), times[hop.name]
        mean = sum(part) / len(part)
        found.append([hop.name, hop.what, *(_us(each) for each in (mean, p["p50"], p["p99"]))])
    whole = stats.percentiles(whole_s(times))
    found.append(["sum", "of the lines above", *(_us(each) for each in _sums(times)), ""])
    found.append(
        ["whole", "measured by the client", *(_us(whole[key]) for key in ("mean", "p50", "p99"))]
    )
    plain = stats.percentiles(unstamped_s)
    found.append(["without stamps", "", *(_us(plain[key]) for key in ("mean", "p50", "p99"))])
    return found


def whole_s(times: Times) -> list[float]:
    """Return the whole latency of each request, from when it was sent."""
    return [sum(parts) for parts in zip(*times.values(), strict=True)]


def adds_up(times: Times) -> float:
    """Return the sum of the hops' medians as a share of the median of the whole."""
    return _sums(times)[1] / stats.percentiles(whole_s(times))["p50"]


def _sums(times: Times) -> tuple[float, float]:
    """Return the sums of the hops' means and of their medians."""
    means = sum(sum(part) / len(part) for part in times.values())
    return means, sum(stats.percentiles(part)["p50"] for part in times.values())


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"
