"""`spillway cost`: the cost of a recorded load, on accelerators only and with spill to CPUs."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from cli.quantities import number, seconds
from cli.trace import read
from common.cost import fleet
from common.cost.fleet import Fleet, FleetComparison, OfferedLoad, PricedDevice
from common.errors import ConfigError

HELP = "what a recorded load costs, with spill and without"
_GUESSED = "whole numbers, so taken for milliseconds (--unit s if they are seconds)"


def add(subparsers: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser("cost", help=HELP, description=HELP)
    parser.add_argument(
        "--trace",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines or CSV with `timestamp` or `timestamp_ms`, and `queries` if more than one each",
    )
    parser.add_argument(
        "--unit",
        choices=("auto", "s", "ms"),
        default="auto",
        help="of `timestamp`; auto: ms if all are whole numbers, else s",
    )
    parser.add_argument("--slo", required=True, help="longest answer, such as 1s or 500ms")
    line = "C queries at once take ALPHA*C+BETA seconds"
    parser.add_argument("--accelerator", required=True, metavar="ALPHA,BETA", help=line)
    parser.add_argument("--cpu", required=True, metavar="ALPHA,BETA", help="the same of the CPUs")
    parser.add_argument("--price", required=True, help="of one accelerator, an hour")
    parser.add_argument(
        "--cpu-price",
        default="0",
        help="of an instance's CPUs, an hour (0: they stand there anyway)",
    )
    parser.add_argument("--devices", default="1", help="accelerators an instance has (1)")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print instances and costs; ConfigError names the flag, or the line of the trace, that cannot be used."""
    slo_s = seconds("--slo", args.slo)
    accelerator = _device("--accelerator", args.accelerator)
    cpu = _device("--cpu", args.cpu)
    devices = number("--devices", args.devices, least=1)
    if devices != int(devices):
        raise ConfigError(f"--devices is {args.devices!r}: expected a whole number")
    price = number("--price", args.price, least=1e-9) * devices
    cpu_price = number("--cpu-price", args.cpu_price, least=0)
    if not accelerator.depth(slo_s):
        alone_s = accelerator.alpha_s + accelerator.beta_s
        raise ConfigError(
            f"--accelerator is {args.accelerator!r}: a single query takes {alone_s:g} s, and the SLO is {slo_s:g} s; "
            "expected a faster device or a longer --slo"
        )
    trace = read(args.trace, args.unit)
    load = fleet.load(trace.times_s, trace.counts, slo_s)
    depths = accelerator.depth(slo_s), cpu.depth(slo_s)
    costs = fleet.compare(load, accelerator, cpu, slo_s, price=price, cpu_price=cpu_price)
    if args.json:
        print(json.dumps(_document(load, depths, slo_s, costs), indent=2))
        return 0
    print(f"trace  {_load(load, slo_s)}")
    if trace.guessed:
        print(f"times  {_GUESSED}")
    print(f"depth  {_depths(*depths)}")
    print()
    for row in _table(costs):
        print(row)
    return 0


# -- flags ----------------------------------------------------------------------------------------


def _device(flag: str, text: str) -> PricedDevice:
    try:
        alpha_s, beta_s = (float(part) for part in text.split(","))
    except ValueError:
        alpha_s = beta_s = math.nan
    if not (1e-9 <= alpha_s <= 86_400 and 0 <= beta_s <= 86_400):
        raise ConfigError(
            f"{flag} is {text[:100]!r}: expected seconds a query, above 0, and seconds a batch, such as 0.018,0.27"
        )
    return PricedDevice(alpha_s, beta_s)


# -- output ---------------------------------------------------------------------------------------


def _load(load: OfferedLoad, slo_s: float) -> str:
    seconds, name = load.duration_s, "s"
    for size, longer in ((60, "min"), (60, "h"), (24, "days")):
        if seconds < 2 * size:
            break
        seconds, name = seconds / size, longer
    return (
        f"{load.queries:,} queries in {seconds:.1f} {name}: {load.rate:.3g} a second on average, "
        f"at most {load.peak:,} within {slo_s:g} s"
    )


def _depths(accelerator: int, cpu: int) -> str:
    if not cpu:
        return f"{accelerator:,} queries at once on the accelerator; the CPUs cannot finish one within the SLO"
    more = cpu / accelerator
    return (
        f"{accelerator:,} queries at once on the accelerator, {cpu:,} more on the CPUs (+{100 * more:.1f} %): "
        f"saves {100 * fleet.saving(more):.1f} % before instances are rounded up"
    )


def _table(costs: tuple[FleetComparison, FleetComparison]) -> list[str]:
    rows = ["by          served by         instances     per hour      per month   saving"]
    for name, each in zip(("peak", "average"), costs, strict=True):
        rows.append(_row(name, "accelerator only", each.alone, ""))
        rows.append(_row("", "with spill", each.spilling, f"{100 * each.saving:7.1f} %"))
    return rows


def _row(name: str, what: str, found: Fleet, saved: str) -> str:
    costs = f"{found.cost_per_hour:13,.2f}{found.cost_per_month:15,.2f}"
    return f"{name:<12}{what:<18}{found.instances:9,}{costs}{saved}"


def _document(
    load: OfferedLoad,
    depths: tuple[int, int],
    slo_s: float,
    costs: tuple[FleetComparison, FleetComparison],
) -> dict[str, Any]:
    return {
        "trace": load._asdict(),
        "slo_s": slo_s,
        "depth": dict(zip(("accelerator", "cpu"), depths, strict=True)),
        "saving_unrounded": fleet.saving(depths[1] / depths[0]),
        **{
            name: {
                "accelerator_only": _fleet(each.alone),
                "with_spill": _fleet(each.spilling),
                "saving": each.saving,
            }
            for name, each in zip(("by_peak", "by_average"), costs, strict=True)
        },
    }


def _fleet(found: Fleet) -> dict[str, float]:
    return {**found._asdict(), "cost_per_month": found.cost_per_month}
