"""`spillway profile`: measure the stages of an answer on this machine, and write the planner's inventory."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from spillway_client import AsyncSpillway

from cli.deployment_check import fetch_mesh
from cli.http import Endpoint, endpoint, exit_status
from cli.instance import running_url
from cli.planned_services import fingerprint
from cli.quantities import count
from cli.stage_times import StageLoad, StageTimer
from common.errors import ConfigError
from planner.deployment import (
    DeploymentPlan,
    MachineFingerprint,
    PlannedCost,
    PlannedPerformance,
    PlannedService,
    write_plan,
)
from planner.inventory import Inventory, ProfilePoint

HELP = "measure embedding, search, prompts and answers here, for `spillway plan deployment`"
SYNTHETIC = "spillway-profile"
_BATCHES, _QUICK_BATCHES = (1, 2, 4, 8), (1, 2)
_SECONDS, _QUICK_SECONDS = 1.5, 0.1
_VECTORS, _QUICK_VECTORS = 5000, 500
_START_S = 240.0


def add(subparsers: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser("profile", help=HELP, description=HELP)
    option = parser.add_argument
    option(
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("profile.json"),
        help="the inventory to write",
    )
    option(
        "--quick",
        action="store_true",
        help="seconds instead of minutes: few and short measurements",
    )
    option("--url", help="measure this running mesh as it is (default: instances started for it)")
    option(
        "--threads",
        metavar="LIST",
        help="threads to measure with, such as 1,2 (default: 1, 2, 4 … up to the cores)",
    )
    option(
        "--collection", help="with --url: search this collection (default: one of random vectors)"
    )
    option("--prompt-tokens", metavar="N", default="512", help="tokens of a prompt (512)")
    option("--answer-tokens", metavar="N", default="32", help="tokens of an answer (32)")
    option("--rerank", metavar="N", default="0", help="measure reranking of N texts too")
    parser.set_defaults(data_dir=None)


def run(args: argparse.Namespace) -> int:
    """Measure and write the file; ConfigError names the flag that cannot be used."""
    load = StageLoad(
        prompt_tokens=count("--prompt-tokens", args.prompt_tokens, most=100_000),
        answer_tokens=count("--answer-tokens", args.answer_tokens, least=2, most=100_000),
        reranked=count("--rerank", args.rerank, least=0, most=1000),
    )
    if args.collection and not args.url:
        raise ConfigError("--collection is given without --url; expected both, or neither")
    machine = fingerprint(device=os.environ.get("SPILLWAY_DEVICE", "auto"))
    return exit_status(lambda: _measure(args, load, machine))


def _measure(args: argparse.Namespace, load: StageLoad, machine: MachineFingerprint) -> int:
    points: dict[tuple[str, int, int], ProfilePoint] = {}
    costs: list[PlannedCost] = []
    for units, where in _meshes(args, machine):
        found, costs = asyncio.run(_of_mesh(args, load, units, where))
        points.update({(each.stage, each.units, each.batch): each for each in found})
    inventory = Inventory(
        chips=machine.cores,
        hosts=1,
        resource="core",
        decode="with_prefix",
        profile=[*points.values()],
        costs=costs,
        machine=machine,
    )
    try:
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(inventory), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(
            f"--out is {args.out}: {error.strerror}; expected a file to write"
        ) from None
    for line in lines(inventory):
        print(line)
    print(f"written: {args.out}")
    return 0


async def _of_mesh(
    args: argparse.Namespace, load: StageLoad, units: int, where: Endpoint
) -> tuple[list[ProfilePoint], list[PlannedCost]]:
    """Return the points of one mesh, and the seconds of the same work by its workers' cost models."""
    quick = args.quick
    async with AsyncSpillway(where.url, where.api_key, timeout_s=120.0) as client:
        timer = StageTimer(
            client,
            load,
            collection=args.collection or SYNTHETIC,
            seconds=_QUICK_SECONDS if quick else _SECONDS,
        )
        vectors = _QUICK_VECTORS if quick else _VECTORS
        await timer.prepare(0 if args.collection else vectors)
        try:
            generates = any(
                model.details.get("kind") == "generate" for model in await client.models.list()
            )
            points = await timer.points(
                units, _QUICK_BATCHES if quick else _BATCHES, generates=generates
            )
        finally:
            if not args.collection:
                await client.collections.delete(SYNTHETIC)
    return points, costs_of(fetch_mesh(where), load)


def costs_of(mesh: Mapping[str, Any], load: StageLoad) -> list[PlannedCost]:
    """Return the seconds of one request's work by kind, by the present cost models of a mesh's workers."""
    work = {
        "embed": (1, load.question_tokens),
        "rerank": (load.reranked, load.reranked * load.question_tokens),
        "chat": (1, load.prompt_tokens),
    }
    seconds: dict[str, list[float]] = {}
    for worker in mesh["workers"]:
        cost, kind = worker["cost"], worker["kind"]
        if kind in work and work[kind][0] and worker["state"] == "ready":
            items, tokens = work[kind]
            each = cost["beta_s"] + cost["alpha_items_s"] * items + cost["alpha_tokens_s"] * tokens
            if each > 0:
                seconds.setdefault(kind, []).append(each)
    return [
        PlannedCost(kind, sum(each) / len(each), *work[kind])  # type: ignore[arg-type]
        for kind, each in sorted(seconds.items())
    ]


# -- measured meshes --------------------------------------------------------------------------------


def _meshes(
    args: argparse.Namespace, machine: MachineFingerprint
) -> Iterator[tuple[int, Endpoint]]:
    """Yield (threads, endpoint) of each mesh to measure: of the given one, or of instances started one by one."""
    if args.url:
        where = endpoint(args, os.environ)
        workers = [
            each for each in fetch_mesh(where)["processes"] if each["service"] == "gpu_worker"
        ]
        yield (workers[0]["threads"] if workers else machine.cores), where
        return
    for threads in _threads(args.threads, machine.cores):
        print(f"measuring with threads: {threads}", flush=True)
        with started(plan_of(machine, threads)) as instance:
            yield threads, Endpoint(instance.url, None)


def _threads(text: str | None, cores: int) -> list[int]:
    if text is not None:
        return sorted({count("--threads", part, most=1024) for part in text.split(",")})
    return [1 << place for place in range(cores.bit_length())]


def plan_of(machine: MachineFingerprint, threads: int) -> DeploymentPlan:
    """Return the plan of an instance whose worker and search compute with `threads` threads."""
    return DeploymentPlan(
        machine=machine,
        services=[
            PlannedService("router"),
            PlannedService("gpu_worker", threads=threads),
            PlannedService("vector_search", threads=threads),
            PlannedService("kv_store"),
        ],
        predicted=PlannedPerformance(ttft_s=0.0, qps=0.0),
    )


class StartedInstance(NamedTuple):
    """An instance that was started for a measurement: its router's URL, and its data directory."""

    url: str
    data_dir: str


@contextmanager
def started(plan: DeploymentPlan) -> Iterator[StartedInstance]:
    """Start an instance of a plan in a directory of its own, and stop it at the end; ConfigError if it fails.

    Settings in the environment apply to it, too.
    """
    with tempfile.TemporaryDirectory(prefix="spillway-profile-") as folder:
        place = Path(folder) / "plan.json"
        place.write_bytes(write_plan(plan))
        data = str(Path(folder) / "data")
        words = ["up", "--detach", "--port", "0", "--no-sample", "--plan", str(place)]
        _command([*words, "--data-dir", data])
        try:
            url = running_url(data)
            if url is None:
                raise ConfigError("the instance that was started has gone")
            yield StartedInstance(url, data)
        finally:
            _command(["down", "--now", "--data-dir", data])


def _command(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", *words],
        capture_output=True, text=True, check=False, timeout=_START_S,
    )  # fmt: skip
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no word"]
        raise ConfigError(f"`spillway {words[0]}` failed: {said[-1].removeprefix('spillway: ')}")


def lines(inventory: Inventory) -> Iterator[str]:
    """Yield the measurements in lines for people."""
    yield f"{'stage':<12}{'threads':>8}{'batch':>7}{'ms':>12}{'requests/s':>13}"
    for each in inventory.profile:
        units = "" if each.stage == "retrieval" else str(each.units)
        yield (
            f"{each.stage:<12}{units:>8}{each.batch:>7}{1e3 * each.latency_s:>12.3f}{each.qps:>13.2f}"
        )
