"""`spillway plan deployment`: the best schedules of a pipeline, and the cheapest one that reaches the goals."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cli.deployment_check import run_write
from cli.quantities import count, number
from cli.trace import read as read_trace
from common.cost import fleet
from common.errors import ConfigError
from planner import front_plot
from planner.deployment import DeploymentPlan, read_plan, write_plan
from planner.explanation import batching, explain, placement, spread
from planner.front_plot import FrontPoint
from planner.goals import Choice, Goals, Prices, choose, within
from planner.inventory import read_inventory
from planner.levers import LEVERS, PlanLever
from planner.planned_deployment import deployment, machine_of, runnable_groups
from planner.rag_schema import STAGES, PlanInputError, read_schema
from planner.schedule_search import RagSchedule, SearchSpace, best_schedules, front
from planner.stage_profile import profile_of

VERB = "deployment"
HELP = "placement, allocation and batches of a pipeline: what is best, and what reaches your goals at the least cost"
GOALS, PRICES = ("ttft_ms", "tpot_ms", "qps"), ("chip", "host")
MOST_BYTES, MOST_BATCH, MOST_SHOWN = 16 << 20, 1 << 14, 20
BUSIEST_S = 10.0  # the busiest seconds of a recorded load give its rate
T = TypeVar("T")


class _Found(NamedTuple):
    """The result of planning: the search space, the goals, the front, the choice, and the recorded load in words."""

    space: SearchSpace
    goals: Goals
    prices: Prices
    front: list[RagSchedule]
    choice: Choice
    kept: int
    load: str


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(VERB, help=HELP, description=HELP)
    option = parser.add_argument
    option("--schema", type=Path, required=True, help="the pipeline's stages, YAML or JSON")
    about = "the machines and what stages take on them, as `spillway profile` writes it"
    option("--inventory", type=Path, required=True, help=about)
    option(
        "--goal", action="append", default=[], metavar="NAME=N",
        help=f"a goal, any of {', '.join(GOALS)}; repeatable",
    )  # fmt: skip
    option(
        "--trace", type=Path, metavar="FILE",
        help=f"a recorded load, as `spillway cost` reads it: its busiest {BUSIEST_S:g} s are the goal qps",
    )  # fmt: skip
    option(
        "--price", action="append", default=[], metavar="NAME=N",
        help="the price of a chip or a host an hour (chip=1, host=0)",
    )  # fmt: skip
    option(
        "--most-batch", action="append", default=[], metavar="STAGE=N",
        help="the largest batch of a stage (decode=1024, others 128)",
    )  # fmt: skip
    option(
        "--lever", action="append", default=[], metavar="NAME",
        help=f"plan with a lever: {', '.join(lever.name for lever in LEVERS)}",
    )  # fmt: skip
    about = "show the rate of every part, and the levers on what binds"
    option("--explain", action="store_true", help=about)
    option("--plot", type=Path, metavar="FILE", help="the front as a picture, .svg or .html")
    option("--running", type=Path, metavar="PLAN", help="mark this plan's deployment in the plot")
    option(
        "--out", type=Path, metavar="PLAN", help="write the chosen plan, for `spillway up --plan`"
    )
    option(
        "--compose", type=Path, metavar="FILE", help="with --out: an override of compose.yaml too"
    )
    option("--kustomize", type=Path, metavar="DIR", help="with --out: a kustomize overlay too")
    option(
        "--k8s", type=Path, metavar="DIR", default=Path("k8s"), help="the folder k8s of a checkout"
    )
    option("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Plan; 1 if no schedule reaches the goals. ConfigError names the flag or the file that cannot be used."""
    if args.plot and args.plot.suffix not in {".svg", ".html"}:
        raise ConfigError(
            f"--plot is {str(args.plot)!r}: expected a name that ends with .svg or .html"
        )
    if (args.compose or args.kustomize) and not args.out:
        raise ConfigError("--out is missing: expected it with --compose and --kustomize")
    levers = [_lever(name) for name in args.lever]
    running = _read(args.running, read_plan) if args.running else None
    try:
        found = _plan(args, levers)
        plan = None
        if args.out:
            plan = deployment(found.space, found.choice.schedule, levers, found.front)
    except PlanInputError as error:
        raise ConfigError(str(error)) from None
    lines = [*_lines(found, fully=args.explain)]
    print(json.dumps(_document(found), indent=2) if args.json else "\n".join(lines))
    if plan:
        _write(args.out, write_plan(plan))
        if args.compose or args.kustomize:
            args.file = args.out
            with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
                run_write(args)
    if args.plot:
        _write(
            args.plot, _picture(found, running, lines, html=args.plot.suffix == ".html").encode()
        )
    return int(bool(found.choice.shortfalls))


# -- input ----------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace, levers: Sequence[PlanLever]) -> _Found:
    goals, prices = _goals(args.goal), _prices(args.price)
    load = ""
    if args.trace:
        if goals.qps:
            raise ConfigError("--trace and --goal qps are given; expected one of them")
        goals, load = _as_recorded(goals, args.trace)
    most = {
        name: count(f"--most-batch {name}", text, most=MOST_BATCH)
        for name, text in _pairs("--most-batch", args.most_batch, STAGES)
    }
    schema = _read(args.schema, read_schema)
    inventory = _read(args.inventory, read_inventory)
    if inventory.profile and any(lever.weight_bytes for lever in levers):
        raise ConfigError(
            f"{args.inventory}: its profile was measured without the lever; expected one measured with it "
            "(`spillway profile` under the same setting), or no --lever"
        )
    if args.out:
        machine_of(inventory)
    for lever in levers:
        schema = lever.applied(schema)
    groups = runnable_groups(schema) if inventory.machine else None
    profile = profile_of(schema, inventory)
    space = SearchSpace(schema, inventory, profile, tuple(most.items()), groups)
    every = best_schedules(space)
    choice = choose(every, goals, prices)
    if choice is None:
        raise ConfigError(
            f"{args.inventory}: nothing fits: no division of {inventory.chips} {inventory.resource}s and "
            f"{inventory.hosts} hosts holds every model and the vectors; expected more of them, or more memory"
        )
    return _Found(space, goals, prices, front(within(every, goals)), choice, len(every), load)


def _read(path: Path, reader: Callable[[bytes, str], T]) -> T:
    """Return the decoded content of a file; ConfigError names the file, the fault and the expected form."""
    try:
        if path.exists() and not path.is_file():  # a device or a pipe may never end
            raise ConfigError(f"{path} is no regular file; expected YAML or JSON")
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} is larger than {MOST_BYTES >> 20} MiB; expected less")
        return reader(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected a file") from None
    except ValueError as error:  # PlanInputError and PlanError are
        raise ConfigError(str(error)) from None


def _pairs(flag: str, given: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in given:
        name, _, value = text.partition("=")
        if name not in names:
            raise ConfigError(
                f"{flag} is {text[:100]!r}: expected NAME=N, NAME one of {', '.join(names)}"
            )
        yield name, value


def _goals(given: Sequence[str]) -> Goals:
    found = {
        name: number(f"--goal {name}", text, least=1e-6)
        for name, text in _pairs("--goal", given, GOALS)
    }
    limits = {
        f"{name}_s": found[f"{name}_ms"] / 1e3 for name in ("ttft", "tpot") if f"{name}_ms" in found
    }
    return Goals(qps=found.get("qps", 0.0), **limits)


def _as_recorded(goals: Goals, path: Path) -> tuple[Goals, str]:
    """Return goals with the rate of a recorded load's busiest seconds, and that load in words."""
    trace = read_trace(path)
    window_s = min(BUSIEST_S, max(1.0, trace.times_s[-1]))
    load = fleet.load(trace.times_s, trace.counts, window_s)
    rate = load.peak / window_s
    words = (
        f"{path.name}: {load.queries:,} requests in {load.duration_s:.4g} s, {load.rate:.3g} a second on average; "
        f"{rate:.3g} in the busiest {window_s:g} s, which is the goal"
    )
    return goals._replace(qps=rate), words


def _prices(given: Sequence[str]) -> Prices:
    return Prices()._replace(
        **{
            name: number(f"--price {name}", text, least=0)
            for name, text in _pairs("--price", given, PRICES)
        }
    )


def _lever(name: str) -> PlanLever:
    for lever in LEVERS:
        if lever.name == name:
            return lever
    raise ConfigError(
        f"--lever is {name[:100]!r}: expected one of {', '.join(lever.name for lever in LEVERS)}"
    )


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected a place to write to") from None


# -- output ---------------------------------------------------------------------------------------


def _lines(found: _Found, *, fully: bool) -> Iterator[str]:
    schema, inventory = found.space.schema, found.space.inventory
    unit, hosts = f"{inventory.resource}s", "hosts" if inventory.hosts > 1 else "host"
    yield (
        f"{schema.name or 'pipeline'}: {', '.join(schema.stages)}; up to {inventory.chips} {unit}, {inventory.hosts} "
        f"{hosts}; times {'measured' if inventory.profile else 'by the roofline model'}"
    )
    if found.load:
        yield found.load
    yield ""
    rate = f"req/s a {inventory.resource}"
    yield f"{'first token ms':>15}{rate:>14}{'req/s':>10}{'token ms':>10}{unit:>8}  placement"
    for each in spread(found.front, MOST_SHOWN):
        mark = "*" if each == found.choice.schedule else " "
        yield (
            f"{mark}{1e3 * each.ttft_s:>14.4g}{each.qps_per_chip:>14.4g}{each.qps:>10.4g}{1e3 * each.tpot_s:>10.4g}"
            f"{each.chips:>8}  {placement(each)}"
        )
    if not found.front:
        yield "  no schedule has tokens as fast as asked"
    elif len(found.front) > MOST_SHOWN:
        yield f"  {len(found.front)} in all, {MOST_SHOWN} shown; --json has all"
    yield ""
    yield _headline(found)
    yield from explain(found.space, found.choice, found.goals, fully=fully)


def _headline(found: _Found) -> str:
    schedule = found.choice.schedule
    cost = f"{found.prices.of(schedule):.6g} an hour"
    if found.choice.shortfalls:
        return f"nothing reaches the goals; the nearest, at {cost}:"
    if found.goals == Goals():
        return f"most requests for their price (no goal is given), at {cost}:"
    return f"cheapest that reaches the goals, at {cost}:"


def _document(found: _Found) -> dict[str, Any]:
    return {
        "goals_reached": not found.choice.shortfalls,
        "shortfalls": found.choice.shortfalls,
        "chosen": _told(found, found.choice.schedule),
        "front": [_told(found, each) for each in found.front],
        "kept": found.kept,
    }


def _told(found: _Found, schedule: RagSchedule) -> dict[str, Any]:
    return {
        **{
            name: getattr(schedule, name)
            for name in ("ttft_s", "tpot_s", "qps", "qps_per_chip", "chips", "hosts")
        },
        "cost": found.prices.of(schedule),
        "placement": placement(schedule),
        "batching": batching(found.space, schedule),
        "groups": [each._asdict() for each in schedule.groups],
        "retrieval_batch": schedule.search_batch,
        "later_retrieval_batch": schedule.again,
    }


def _picture(
    found: _Found, running: DeploymentPlan | None, lines: Sequence[str], *, html: bool
) -> str:
    def point(each: RagSchedule) -> FrontPoint:
        said = f"{placement(each)}; {batching(found.space, each)}"
        return FrontPoint(1e3 * each.ttft_s, each.qps_per_chip, said)

    inventory = found.space.inventory
    name = found.space.schema.name or "pipeline"
    title = f"{name}: what {inventory.chips} {inventory.resource}s can give"
    chosen, runs = point(found.choice.schedule), None
    if running and running.predicted.ttft_s and running.predicted.qps_per_chip:
        given = running.predicted
        runs = FrontPoint(1e3 * given.ttft_s, given.qps_per_chip, f"plan {running.digest}")
    points = [point(each) for each in found.front] or [chosen]
    picture = front_plot.svg(points, title, chosen=chosen, running=runs)
    return front_plot.page(picture, title, lines) if html else picture
