"""`spillway dead-letters`: list, show and replay jobs that were convicted of failing."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import sys
from typing import Any

import msgspec

from cli.bus_access import add_place, with_bus
from common.bus import Bus, NewJob, Notifications
from common.errors import ConfigError
from common.ids import Family, family_of, job_id, ulid
from common.registry.dead_letters import DeadLetters
from common.wire.jobs import GenerateWork, decode_work
from common.wire.message import BadMessage, encode
from common.wire.registry import DeadLetter

HELP = "list, show and replay convicted jobs"


def add(subparsers: Any) -> None:
    """Add the command and its verbs."""
    parser = subparsers.add_parser("dead-letters", help=HELP, description=HELP)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    listing = verbs.add_parser("list", help="one line for each")
    listing.add_argument("--family", help="only of this one, for example embed.minilm/0")
    show = verbs.add_parser("show", help="error and trace of one")
    replay = verbs.add_parser("replay", help="try it again as a new request")
    replay.add_argument("--timeout", type=float, default=60.0, help="seconds it may take")
    for verb in (show, replay):
        verb.add_argument("job", metavar="JOB", help="the id that `list` shows")
    for verb in (listing, show):
        verb.add_argument("--json", action="store_true", help="for programs")
    for verb in (listing, show, replay):
        add_place(verb)


def run(args: argparse.Namespace) -> int:
    """Run the verb; 1 if there is no such dead letter, or the replay fails."""
    return with_bus(args, lambda bus: _run(args, bus))


async def _run(args: argparse.Namespace, bus: Bus) -> int:
    if args.verb == "list":
        try:
            family = Family.parse(args.family) if args.family else None
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return _list(await DeadLetters(bus).all(family), as_json=args.json)
    try:
        letters = await DeadLetters(bus).all(family_of(args.job))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    letter = next((letter for letter in letters if letter.job == args.job), None)
    if letter is None:
        sys.stderr.write(f"spillway: no dead letter {args.job}; `dead-letters list` shows them\n")
        return 1
    if args.verb == "show":
        return _show(letter, as_json=args.json)
    return await _replay(letter, bus, args.timeout)


def _shown(letter: DeadLetter) -> dict[str, Any]:
    """Return a dead letter's fields without the payload, which holds a user's text."""
    names = ("job", "tenant", "code", "message", "trace", "attempts", "items", "tokens", "at_ms")
    told = {name: getattr(letter, name) for name in names}
    return {**told, "payload_bytes": len(letter.payload)}


def _when(letter: DeadLetter) -> str:
    return f"{dt.datetime.fromtimestamp(letter.at_ms / 1000, dt.UTC):%Y-%m-%d %H:%M:%S}"


def _list(letters: list[DeadLetter], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps([_shown(letter) for letter in letters], indent=2))
        return 0
    for letter in letters:
        print(f"{_when(letter)}  {letter.job}  {letter.tenant}  {letter.code}: {letter.message}")
    if not letters:
        print("no dead letters")
    return 0


def _show(letter: DeadLetter, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(_shown(letter), indent=2))
        return 0
    print(f"job       {letter.job}\ntenant    {letter.tenant}\nat        {_when(letter)}")
    print(f"attempts  {letter.attempts}\nsize      {letter.items} items, {letter.tokens} tokens")
    print(f"error     {letter.code}: {letter.message}")
    if letter.trace:
        print(f"\n{letter.trace.rstrip()}")
    return 0


def _classes(family: Family) -> tuple[str, ...]:
    """Return the lanes of a family's kind, in the order in which admission tries them."""
    kind = family.name.split(".", 1)[0]
    known = {"request": ("router",), "search": ("cpu",), "chat": ("gpu",), "sessions": ("kv",)}
    return known.get(kind, ("gpu", "cpu"))


def _generation(letter: DeadLetter) -> GenerateWork | None:
    """Return the generation of a dead letter's job; None if it was another kind of job, or is unreadable."""
    with contextlib.suppress(BadMessage):
        work = decode_work(letter.payload)
        return work if isinstance(work, GenerateWork) else None
    return None


def _payload(letter: DeadLetter, work: GenerateWork | None) -> bytes:
    """Return the payload for a replay of the job, without extensions of its prompt.

    The request of a grounded answer has ended and finds no more passages: a generation that waited for them would wait
    until its deadline. So the replay has only the passages with which the job began.
    """
    if work is None or work.extensions is None:
        return letter.payload
    return encode(msgspec.structs.replace(work, extensions=None))


async def _replay(letter: DeadLetter, bus: Bus, timeout_s: float) -> int:
    if letter.code == "bad_entry":
        sys.stderr.write(f"spillway: {letter.job} cannot be replayed: its entry was no job\n")
        return 1
    family, work = family_of(letter.job), _generation(letter)
    job = NewJob(job_id(family, ulid()), _payload(letter, work), letter.items, letter.tokens)
    router = f"cli-{ulid()}"
    deadline_ms = bus.clock.now_ms() + int(timeout_s * 1000)
    turn = work.turn if work else None  # a replay is the same turn of its session
    journal = Notifications(bus.connection, router)
    await journal.start()
    try:
        admission = await bus.admission.admit(
            [job],
            classes=_classes(family),
            router=router,
            tenant=letter.tenant,
            deadline_ms=deadline_ms,
            replay_of=letter.job,
            session=turn.session if turn else "",
            version=turn.version if turn else 0,
        )
        if admission.outcome == "refused":
            sys.stderr.write(f"spillway: refused ({admission.reason}); try again later\n")
            return 1
        event = await journal.end(job.id, deadline_ms)
    finally:
        await journal.stop()
    if work and work.extensions:
        print("written from the passages it began with; later ones were found by its request")
    print(f"{job.id}  {event.kind}" + (f"  {event.code}: {event.message}" if event.code else ""))
    if event.kind != "result":
        return 1
    await DeadLetters(bus).drop(letter.job)
    return 0
