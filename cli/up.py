"""`spillway up`: in the foreground, or detached as a daemon of its own."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from cli.console import READY, Console
from cli.instance import Instance
from cli.instance_plan import InstancePlan, make
from cli.planned_services import shown_plan
from cli.supervisor import supervise
from common import log, metrics
from common.config import Common
from common.placement import DEMONSTRATION

NAME = "up"
HELP = "start an instance: the server, the services, the sample collections"
_LOG_CAP_BYTES = 10 << 20


def add(subparsers: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(NAME, help=HELP, description=HELP)
    parser.add_argument("--detach", action="store_true", help="return when all is ready")
    parser.add_argument("--port", help="where the router listens (default 8080; 0: a free one)")
    parser.add_argument(
        "--model",
        dest="chat_model",
        metavar="MODEL",
        help="the chat model: a GGUF file, a directory, a hub id, or none (default: the one that ships)",
    )
    parser.add_argument("--data-dir", help="where everything is kept (default .spillway)")
    parser.add_argument("--config", metavar="FILE", help="a TOML file with SPILLWAY_* names")
    parser.add_argument(
        "--no-sample",
        dest="sample",
        action="store_false",
        default=None,
        help="without sample collections",
    )
    about = "start what a deployment plan says, made by `spillway plan deployment`"
    parser.add_argument("--plan", metavar="FILE", help=about)
    about = "start a plan that was made for another machine"
    parser.add_argument("--other-machine", action="store_true", help=about)
    parser.add_argument("--status-fd", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Start an instance and keep it running; ConfigError if a setting cannot be used."""
    plan = make(vars(args), os.environ)
    if args.detach:
        return _detach(args, plan)
    console = Console(args.status_fd)
    log.setup("supervisor", plan.config)
    console.say(f"spillway {metrics.version()}, data in {_short(plan.instance.data_dir)}")
    if plan.planned is not None:
        console.say(shown_plan(plan.planned.plan))
    elif plan.overflow_workers and len(plan.lanes) == 1:
        console.say(f"SPILLWAY_OVERFLOW_WORKERS is {plan.overflow_workers}: {DEMONSTRATION}")
    status = supervise(plan, console, lambda ready: _welcome(ready, console))
    if status == 0:
        console.say("spillway: stopped")
    return status


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _command(plan: InstancePlan) -> tuple[str, str]:
    """Return the command by which this user reaches the instance, and the option that names it."""
    script = Path(sys.executable).with_name("spillway")
    command = "spillway" if shutil.which("spillway") else _short(script)
    default = Instance.at(Common().data_dir).data_dir == plan.instance.data_dir
    return command, "" if default else f" --data-dir {shlex.quote(_short(plan.instance.data_dir))}"


def _welcome(plan: InstancePlan, console: Console) -> None:
    command, where = _command(plan)
    body = '{"input": "water over the dam"}'
    console.say()
    console.say(f"Spillway is ready at {plan.url} (logs in {_short(plan.instance.logs)}). Try:")
    console.say()
    console.say(f"  {command} search docs 'wait for several tasks at once'{where}")
    if plan.chat.value:
        asked = " --collection handbook" if plan.config.sample and plan.open_to_all else ""
        console.say(f"  {command} chat{asked}{where}")
    folder = shlex.quote(_short(Path("docs").resolve())) if Path("docs").is_dir() else "DIR"
    console.say(f"  {command} ingest notes {folder}{where}")
    console.say(
        f"  curl -s {plan.url}/v1/embeddings -H 'Content-Type: application/json' -d '{body}'"
    )
    console.say()


def _detach(args: argparse.Namespace, plan: InstancePlan) -> int:
    """Start the supervisor as a session of its own; return when it is ready, or 1 with its log's tail."""
    plan.instance.prepare()
    flags = []
    for name in ("port", "data_dir", "config", "chat_model", "plan"):
        value = getattr(args, name)
        if value is not None:
            flag = "model" if name == "chat_model" else name.replace("_", "-")
            flags += [f"--{flag}", str(value)]
    if args.sample is False:
        flags.append("--no-sample")
    if args.other_machine:
        flags.append("--other-machine")
    path = plan.instance.logs / "supervisor.log"
    if path.exists() and path.stat().st_size > _LOG_CAP_BYTES:
        path.replace(f"{path}.1")
    read, write = os.pipe()
    with path.open("ab") as output:
        began = output.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "up", *flags, "--status-fd", str(write)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[write],
            start_new_session=True,
        )
    os.close(write)
    shown = set()
    try:
        with os.fdopen(read, encoding="utf-8") as lines:
            for line in lines:
                shown.add(line)
                if line.rstrip("\n") == READY:
                    return _detached(plan, child.pid)
                sys.stdout.write(line)
                sys.stdout.flush()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        child.wait()
        return 130
    status = child.wait()
    with path.open(encoding="utf-8", errors="replace") as output:
        output.seek(began)
        said = [line for line in output if line.startswith("spillway: ")]
    if not said or said[-1] not in shown:
        sys.stderr.write(said[-1] if said else f"spillway: not started; see {path}\n")
    return status if status in {1, 2} else 1


def _detached(plan: InstancePlan, pid: int) -> int:
    url = Instance.at(plan.config.data_dir).read_note("supervisor").get("url", plan.url)
    command, where = _command(plan)
    print(f"spillway: ready at {url} (process {pid}); `{command} down{where}` stops it")
    return 0
