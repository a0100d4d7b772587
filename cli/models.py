"""`spillway models`: list an instance's models; pull, list, show and remove models on this machine's disk."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from spillway_client import AsyncSpillway

from cli import model_store
from cli.http import add_server, talk
from cli.model_forecast import ModelForecast, forecast
from common.config import WorkerConfig, load
from common.devices import detect
from common.placement import place

_GIB = 1 << 30
# Good models for their size, by the memory (GB) of a machine with room for the model and its conversations.
GOOD = {
    4: "Qwen/Qwen2.5-1.5B-Instruct-GGUF/qwen2.5-1.5b-instruct-q8_0.gguf",
    8: "Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q4_K_M.gguf",
    16: "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q8_0.gguf",
    80: "Qwen/Qwen3-32B-GGUF/Qwen3-32B-Q8_0.gguf",
}


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its verbs; without a verb it asks a server."""
    parser = subparsers.add_parser(
        "models", help="list the models of a server; pull, list, show, remove those on this machine"
    )
    parser.add_argument("--json", action="store_true", help="for programs: everything there is")
    add_server(parser)
    parser.set_defaults(run=run, verb=None)
    verbs = parser.add_subparsers(metavar="VERB")
    for verb, help_text, named in (
        ("pull", "download a model: org/name, or one file of it: org/name/FILE.gguf", True),
        ("list", "list the downloaded models, and good ones by the memory they need", False),
        ("show", "predict memory and speed on this machine; nothing is loaded", True),
        ("rm", "delete a downloaded model", True),
    ):
        each = verbs.add_parser(verb, help=help_text, description=help_text)
        if named:
            about = "a hub id, or the path of a file or directory" if verb == "show" else "a hub id"
            each.add_argument("model", help=about)
        about = "for programs"
        each.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=about)
        each.set_defaults(verb=verb)


def run(args: argparse.Namespace) -> int:
    """Run the verb; ConfigError or SpillwayError if that fails."""
    if args.verb is None:
        return talk(args, lambda client: _models(client, as_json=args.json))
    verbs = {"pull": _pull, "list": _list, "show": _show, "rm": _remove}
    return verbs[args.verb](args)


def _pull(args: argparse.Namespace) -> int:
    path = model_store.pull(args.model)
    print(
        json.dumps({"path": str(path)})
        if args.json
        else f"{path}\nspillway up --model {args.model}"
    )
    return 0


def _list(args: argparse.Namespace) -> int:
    found = model_store.stored()
    if args.json:
        print(
            json.dumps({"downloaded": [each._asdict() for each in found], "good": GOOD}, indent=2)
        )
        return 0
    for each in found:
        print("  ".join([each.model, _size(each.size), *each.files]))
    if not found:
        print("no models downloaded yet")
    print("\ngood ones, by the machine's memory (spillway models pull NAME):")
    for memory, name in GOOD.items():
        print(f"  {memory:>2} GB  {name}")
    return 0


def _show(args: argparse.Namespace) -> int:
    path = model_store.find(args.model)
    if path is None:
        raise model_store.missing(args.model)
    config = load(WorkerConfig, os.environ)
    machine = detect()
    _, threads = place(machine, threads=config.threads, cores=config.cores)
    found = forecast(str(path), config, threads=threads or machine.usable_cores)
    memory = machine.memory_limit_bytes or machine.memory_bytes
    if args.json:
        print(json.dumps({**dataclasses.asdict(found), "memory_bytes": memory}, indent=2))
        return 0
    for name, line in _lines(path, found, memory):
        print(f"{name:<12}{line}")
    return 0


def _lines(path: Path, found: ModelForecast, memory: int) -> list[tuple[str, str]]:
    """Return lines for people: a name and a sentence each."""
    tokens = min(found.context, 8192)
    needed = found.weight_bytes + tokens * found.token_bytes
    weights = f"{_size(found.weight_bytes)} of weights, {found.token_bytes / 1024:.0f} KiB a token"
    verdict = "fits" if needed < 0.9 * memory else "does not fit"
    speed = "not predicted: the compiled kernels are not to be had"
    if found.tokens_per_s is not None and found.bandwidth is not None:
        speed = (
            f"about {found.tokens_per_s:.3g} tokens a second, one stream "
            f"(memory brings {found.bandwidth / 1e9:.1f} GB/s)"
        )
    return [
        ("model", f"{path}: {found.parameters:,} weights, {found.kind}"),
        ("disk", _size(found.disk_bytes)),
        (
            "memory",
            f"{weights}: {_size(needed)} with {tokens:,} tokens; {verdict} in {_size(memory)}",
        ),
        ("speed", speed),
        ("context", f"{found.context:,} tokens"),
        ("start it", f"spillway up --model {path}"),
    ]


def _remove(args: argparse.Namespace) -> int:
    freed = model_store.remove(args.model)
    print(
        json.dumps({"freed_bytes": freed})
        if args.json
        else f"deleted; {_size(freed)} are free again"
    )
    return 0


def _size(size: int) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / (1 << 20):.1f} MiB"


async def _models(client: AsyncSpillway, *, as_json: bool) -> int:
    models = await client.models.list()
    if as_json:
        print(json.dumps([model.details for model in models], indent=2))
        return 0
    for model in models:
        print("  ".join([model.id, *_about(model.details)]))
    if not models:
        print("no models yet: no worker has announced one")
    return 0


def _about(details: dict[str, Any]) -> list[str]:
    """Return the main size of a model in words: a generator's context, an encoder's dimension."""
    generates = details.get("kind") == "generate"
    names = {"kind": "kind", "dimension": "dimension", "max_tokens": "max_tokens"}
    if generates:
        names = {"kind": "kind", "max_tokens": "context"}
    return [f"{shown} {details[name]}" for name, shown in names.items() if name in details]
