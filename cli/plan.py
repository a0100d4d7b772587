"""`spillway plan` and `spillway plan retrieval`: the best ratio of inference to retrieval units."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from cli import deployment_check, plan_deployment
from cli.quantities import count, seconds
from common.errors import ConfigError
from planner.disaggregation import (
    RetrievalLoad,
    SplitPrediction,
    UnitSplit,
    best_split,
    inference_share,
    predict,
)
from planner.scale_out import TreeNetwork, is_known, scaled_quantile

HELP = "how many processes generate and how many retrieve, for the highest throughput"
SHARDS = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_UNITS, MOST_TOKENS, MOST_BYTES = 100_000, 1_000_000, 64 << 20
_EXPECTED = "expected a JSON object of measured times"
_Seconds = Annotated[float, msgspec.Meta(ge=1e-6, le=86_400)]
_Units = Annotated[int, msgspec.Meta(ge=1, le=MOST_UNITS)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]


class PlanInput(msgspec.Struct, forbid_unknown_fields=True):
    """The input of a plan, as in a file; `retrieval_latencies_s` are seconds of single searches of one shard."""

    inference_s: _Seconds | None = None
    retrieval_s: _Seconds | None = None
    interval: _Tokens = 1
    batch: _Tokens = 1
    inference_units: _Units | None = None
    retrieval_units: _Units | None = None
    units: Annotated[int, msgspec.Meta(ge=2, le=2 * MOST_UNITS)] | None = None
    retrieval_latencies_s: list[_Seconds] = []


class ShardedLatency(NamedTuple):
    """The latency of a search over several shards; a quantile is not known if the sample ends before it."""

    shards: int
    median_s: float
    median_is_known: bool
    p99_s: float
    p99_is_known: bool


def add(subparsers: Any) -> None:
    """Add the command and its verbs."""
    about = "plan a deployment from measured times; check a mesh against a plan, write it as files"
    parser = subparsers.add_parser("plan", help=about, description=about)
    verbs = parser.add_subparsers(dest="verb", metavar="WHAT", required=True)
    retrieval = verbs.add_parser("retrieval", help=HELP, description=HELP)
    option = retrieval.add_argument
    option("--inference", metavar="TIME", help="one step of a batch, such as 12ms")
    option("--retrieval", metavar="TIME", help="one retrieval for a batch, such as 30ms")
    option("--interval", metavar="N", help="tokens between two retrievals of a sequence (1)")
    option("--batch", metavar="N", help="sequences of a batch (1)")
    option("--inference-units", metavar="N", help="processes that generate now")
    option("--retrieval-units", metavar="N", help="processes that retrieve now, or sets of shards")
    option("--units", metavar="N", help="processes of both kinds together, instead of a split")
    option(
        "--file", type=Path, help="these values as JSON, in seconds: inference_s, retrieval_s, …"
    )
    option("--json", action="store_true", help="for programs")
    plan_deployment.add(verbs)
    deployment_check.add(verbs)


def run(args: argparse.Namespace) -> int:
    """Run the verb; ConfigError names the flag or the file that cannot be used."""
    verbs = {
        "retrieval": run_retrieval,
        plan_deployment.VERB: plan_deployment.run,
        "check": deployment_check.run_check,
        "write": deployment_check.run_write,
    }
    return verbs[args.verb](args)


def run_retrieval(args: argparse.Namespace) -> int:
    """Print the figures of the splits; ConfigError names the flag or the file that cannot be used."""
    given = _given(args)
    load, now, units = _load(given), _now(given), _units(given)
    best = predict(load, best_split(load, units))
    splits = {"best": best} if now is None else {"now": predict(load, now), "best": best}
    if args.json:
        print(json.dumps(_document(load, splits, given.retrieval_latencies_s), indent=2))
        return 0
    for line in _table(load, splits):
        print(line)
    for line in _scale_out(given.retrieval_latencies_s):
        print(line)
    return 0


# -- input ----------------------------------------------------------------------------------------


def _given(args: argparse.Namespace) -> PlanInput:
    """Return the input from the file, with values from flags in place of the file's."""
    given = PlanInput() if args.file is None else _read(args.file)
    for name in ("inference", "retrieval"):
        if (text := getattr(args, name)) is not None:
            setattr(given, f"{name}_s", seconds(f"--{name}", text, least="1us"))
    most = {"interval": MOST_TOKENS, "batch": MOST_TOKENS, "units": 2 * MOST_UNITS}
    for name in ("interval", "batch", "units", "inference_units", "retrieval_units"):
        if (text := getattr(args, name)) is not None:
            flag, least = f"--{name.replace('_', '-')}", 2 if name == "units" else 1
            setattr(given, name, count(flag, text, least=least, most=most.get(name, MOST_UNITS)))
    return given


def _read(path: Path) -> PlanInput:
    try:
        if path.exists() and not path.is_file():  # a device or a pipe may never end
            raise ConfigError(f"{path} is no regular file: {_EXPECTED}")
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} is larger than {MOST_BYTES >> 20} MiB: {_EXPECTED}")
        return msgspec.json.decode(path.read_bytes(), type=PlanInput)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {_EXPECTED}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {str(error)[:200]}; {_EXPECTED}") from None


def _load(given: PlanInput) -> RetrievalLoad:
    latencies = given.retrieval_latencies_s
    retrieval_s = given.retrieval_s
    if retrieval_s is None and latencies:
        retrieval_s = sum(latencies) / len(latencies)
    if given.inference_s is None or retrieval_s is None:
        flag = "--inference" if given.inference_s is None else "--retrieval"
        raise ConfigError(f"{flag} is missing: expected a measured time, such as 12ms")
    return RetrievalLoad(given.inference_s, retrieval_s, given.interval, given.batch)


def _now(given: PlanInput) -> UnitSplit | None:
    if given.inference_units is None or given.retrieval_units is None:
        return None
    return UnitSplit(given.inference_units, given.retrieval_units)


def _units(given: PlanInput) -> int:
    now = _now(given)
    if now is None and given.units is None:
        raise ConfigError(
            "--units is missing: expected it, or both --inference-units and --retrieval-units"
        )
    return given.units or sum(now or ())


# -- output ---------------------------------------------------------------------------------------


def _table(load: RetrievalLoad, splits: dict[str, SplitPrediction]) -> Iterator[str]:
    steps = f"{load.interval} steps" if load.interval > 1 else "1 step"
    yield (
        f"a batch of {load.batch}: {steps} of {1e3 * load.inference_s:.4g} ms, then a retrieval of "
        f"{1e3 * load.retrieval_s:.4g} ms; without waiting on either side "
        f"{inference_share(load):.1%} of the units generate"
    )
    yield ""
    yield "       units that          tokens/s, times that     generating units        retrieving units"
    yield "       generate  retrieve  vary little  vary much   compute  wait  queue    work    idle"
    for name, each in splits.items():
        shares = (each.computes, each.is_answered, each.queues)
        yield (
            f"{name:<7}{each.split.inference:8,}{each.split.retrieval:10,}"
            f"{each.tokens_per_s:13,.1f}{each.tokens_per_s_varying:11,.1f}  "
            f"{shares[0]:8.1%}{shares[1]:6.0%}{shares[2]:7.0%}"
            f"{each.retrieval_works:8.1%}{each.retrieval_idles:8.1%}"
        )


def _scale_out(latencies_s: list[float]) -> Iterator[str]:
    if not latencies_s:
        return
    yield ""
    yield f"the slowest of many shards, from {len(latencies_s):,} latencies of one (≥: too few to say more)"
    yield "shards    median ms       p99 ms"
    for each in _growth(latencies_s):
        yield (
            f"{each.shards:6}{_at_least(each.median_s, known=each.median_is_known):>13}"
            f"{_at_least(each.p99_s, known=each.p99_is_known):>13}"
        )


def _growth(latencies_s: list[float]) -> Iterator[ShardedLatency]:
    network, many = TreeNetwork(), len(latencies_s)
    for shards in SHARDS:
        found: list[Any] = []
        for quantile in (0.5, 0.99):
            found.append(scaled_quantile(latencies_s, shards, quantile, network))
            found.append(is_known(many, shards, quantile))
        yield ShardedLatency(shards, *found)


def _at_least(value_s: float, *, known: bool) -> str:
    return f"{'' if known else '≥ '}{1e3 * value_s:.3f}"


def _document(
    load: RetrievalLoad, splits: dict[str, SplitPrediction], latencies_s: list[float]
) -> dict[str, Any]:
    found: dict[str, Any] = {"load": asdict(load), "inference_share": inference_share(load)}
    for name, each in splits.items():
        idle = {
            "inference_idles": each.inference_idles,
            "retrieval_idles": each.retrieval_idles,
        }
        found[name] = {**asdict(each), "split": each.split._asdict(), **idle}
    if latencies_s:
        found["shards"] = [each._asdict() for each in _growth(latencies_s)]
    return found
