"""The console script: load the command's module, run the command, and print its error as one sentence."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import log, metrics
from common.errors import ConfigError, SpillwayError

# name -> (module, function that adds it, function that runs it, help)
COMMANDS: dict[str, tuple[str, str, str, str]] = {
    "up": ("cli.up", "add", "run", "start an instance: server, services, sample collections"),
    "status": ("cli.status", "add_status", "run_status", "show whether an instance is ready"),
    "down": ("cli.status", "add_down", "run_down", "stop an instance in order"),
    "chat": ("cli.chat", "add", "run", "talk to the chat model, or ask it about a collection"),
    "samples": ("cli.samples", "add", "run", "load the sample collections"),
    "ingest": ("cli.ingest", "add", "run", "put files and folders into a collection"),
    "search": ("cli.search", "add", "run", "search a collection by text"),
    "explain": (
        "cli.explain",
        "add",
        "run",
        "show how a collection searches, and why; or when a request's stages ran",
    ),
    "tune": ("cli.tune", "add", "run", "find the best index for a recall goal, and build it"),
    "reembed": ("cli.reembed", "add", "run", "embed a collection again with the current encoder"),
    "shards": ("cli.shards", "add", "run", "show, split and move a collection's shards"),
    "sessions": ("cli.sessions", "add", "run", "list, show, delete, pin and export conversations"),
    "models": ("cli.models", "add", "run", "list served models; pull, show and remove models here"),
    "devices": ("cli.devices", "add", "run", "show this machine's devices and the lanes they make"),
    "cost": ("cli.cost", "add", "run", "compute a recorded load's cost, with spill and without"),
    "profile": ("cli.profile", "add", "run", "measure an answer's stages here, for a plan"),
    "plan": ("cli.plan", "add", "run", "plan a deployment from measured times, check a plan"),
    "keys": ("cli.keys", "add", "run", "create, list, rotate and revoke API keys"),
    "dead-letters": ("cli.dead_letters", "add", "run", "list, show and replay convicted jobs"),
    "bench": ("bench.cli", "add", "run", "run a benchmark by its id (in a checkout)"),
}


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spillway",
        description="Chat, embeddings and vector search that nothing can lose, from one machine up.",
    )
    parser.add_argument("--version", action="version", version=f"spillway {metrics.version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, add, _, help_text) in COMMANDS.items():
        if name == chosen:  # other commands' modules are not loaded
            getattr(_load(name, module), add)(subparsers)
        else:
            subparsers.add_parser(name, help=help_text)
    return parser


def _load(name: str, module: str) -> Any:
    """Import a command's module; `bench` is beside the installed packages, only in a checkout."""
    if name == "bench":
        checkout = Path(__file__).resolve().parent.parent
        if not (checkout / "bench").is_dir():
            raise ConfigError(
                "spillway bench measures a checkout; expected the repository, not an installed package"
            )
        sys.path.insert(0, str(checkout))
    return importlib.import_module(module)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 = done, 1 = it failed, 2 = a wrong command line or setting, 130 = interrupted."""
    words: list[str] = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), None)
    try:
        args: Any = _parser(chosen).parse_args(words)
        module, _, run, _ = COMMANDS[args.command]
        status: int = getattr(_load(args.command, module), run)(args)
    except ConfigError as error:
        sys.stderr.write(f"spillway: {log.mask(str(error))}\n")
        return 2
    except SpillwayError as error:
        sys.stderr.write(f"spillway: {log.mask(error.message)}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader (`| head`) has seen enough
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())
