"""Makes the archive of a data directory: `python -m tests.guards.archive --checkout PATH`.

What it holds was made over HTTP and the command line and then cut off by SIGKILL in the middle of work: API keys with
quotas, collections with documents and a write that no replica has applied, sessions with turns, KV pages on disk, a
dead letter, jobs that nobody has begun. Beside it lies a list of what must be found when the directory is opened again.
The archive is made once, from the tree whose data must stay readable, and not again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import tarfile
import tempfile
import threading
from pathlib import Path
from typing import Any

import redis

from tests.guards.checkout import ROOT, Checkout, Instance
from tests.guards.script import Script
from tests.support.waiting import until_sync

DATA = Path(__file__).parent / "data"
ARCHIVE, LIST = DATA / "directory.tar.gz", DATA / "directory.json"
KEPT = ("redis", "search", "pages")
# So little room for pages that most of a session's come to the disk, and a disk for a few.
SETTINGS = {
    "SPILLWAY_KEYS": "on",
    "SPILLWAY_PAGES_BYTES": "6000000",
    "SPILLWAY_DISK_BYTES": "6000000",
    "SPILLWAY_PAGES_TTL_S": "316224000",
}
_REQUEST = re.compile(rb"request~0~[0-9a-z]{26}")
FOR_EVER_S = 316_224_000
CHAT, EMBED = "/v1/chat/completions", "/v1/embeddings"
TEXTS = {
    "water": "A spillway carries the water that does not fit behind the dam.",
    "bread": "Knead the dough, let it rise, and bake it until it is brown.",
    "stars/sun": "A star shines because hydrogen is fused into helium inside it.",
}
NEAREST = {"vector": [0, 1, 0], "k": 3}
LATE = "4"  # the point whose deletion a write takes back that no replica has applied
LANES = ("{embed.minilm/0}:lane:gpu", "{chat.spillway-demo/0}:lane:gpu")
QUESTIONS = ("Where does water go?", "How do I make a loaf?", "Why does the sun give light?")
OPENING = "Remember the old mill by the river, and the dam above it. " * 12


def turn(script: Script, session: str, text: str, **more: Any) -> Any:
    """Take a session's turn and return the answer."""
    said = [{"role": "user", "content": text}]
    body = {"session": session, "messages": said, "temperature": 0, "max_tokens": 16}
    reply = script.ask("POST", CHAT, {**body, **more})
    if reply.status != 200:
        raise RuntimeError(f"no turn: {reply}")
    return reply.json


def search(script: Script, name: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return hits: id, score and text."""
    found = script.ask("POST", f"/v1/collections/{name}/search", body).json["data"]
    return [
        {"id": hit["id"], "score": round(hit["score"], 3), "text": hit.get("text")} for hit in found
    ]


def keys(instance: Instance) -> dict[str, Any]:
    """Make keys: one without a limit, one with all of them, one revoked."""
    limits = {
        "requests-per-minute": 2,
        "tokens-per-minute": 1000,
        "concurrency": 3,
        "page-bytes": 4_000_000,
    }
    flags = [word for name, value in limits.items() for word in (f"--{name}", str(value))]
    made = {
        "alpha": instance.said("keys", "create", "--tenant", "alpha", "--name", "a note"),
        "beta": instance.said("keys", "create", "--tenant", "beta", *flags),
        "gone": instance.said("keys", "create", "--tenant", "gamma"),
    }
    instance.said("keys", "revoke", made["gone"])
    return {"keys": made, "listed": json.loads(instance.said("keys", "list", "--json"))}


def collections(script: Script) -> dict[str, Any]:
    """Make a collection of texts and one of vectors."""
    documents = [
        {"id": name, "text": text, "metadata": {"n": number, "deep": {"name": name}}}
        for number, (name, text) in enumerate(TEXTS.items())
    ]
    points = [{"id": str(n), "vector": [n, 1, 0], "metadata": {"n": n}} for n in range(5)]
    script.ask("POST", "/v1/collections", {"name": "texts"})
    vectors = {"name": "points", "model": None, "dimension": 3, "metric": "l2"}
    script.ask("POST", "/v1/collections", vectors)
    script.ask("POST", "/v1/collections", {"name": "removed"})
    for name, given in (("texts", documents), ("points", points), ("removed", documents)):
        made = script.ask("POST", f"/v1/collections/{name}/documents", {"documents": given})
        if made.status != 200:
            raise RuntimeError(f"not stored: {made}")
    script.ask("DELETE", "/v1/collections/points/documents/4")
    script.ask(
        "POST", "/v1/collections/texts/documents", {"documents": [{"id": "gone", "text": "x"}]}
    )
    script.ask("DELETE", "/v1/collections/texts/documents/gone")
    script.ask("DELETE", "/v1/collections/removed")
    listed = script.ask("GET", "/v1/collections").json["data"]
    return {
        "collections": sorted(listed, key=lambda each: str(each["name"])),
        "hits": {text: search(script, "texts", {"text": text, "k": 1}) for text in QUESTIONS},
        "nearest": search(script, "points", NEAREST),
    }


def sessions(script: Script) -> dict[str, Any]:
    """Make sessions: one of several turns, one pinned, one empty."""
    made = {}
    for name in ("pinned", "talk", "empty"):
        body = {"ttl_s": FOR_EVER_S, "metadata": {"title": name}}
        made[name] = script.ask("POST", "/v1/sessions", body).json["id"]
    turn(script, made["pinned"], "What can you do?", max_tokens=40)
    for text in (OPENING, "And what lies above the mill?", "Who are you?"):
        turn(script, made["talk"], text)
    pinned = script.ask("POST", f"/v1/sessions/{made['pinned']}", {"pin": True})
    if pinned.status != 200:
        raise RuntimeError(f"not pinned: {pinned}")

    def on_disk() -> Any:
        return script.ask("GET", f"/v1/sessions/{made['talk']}/pages").json["tiers"]["disk"]

    until_sync(on_disk, "pages of the session are on disk")
    return {name: told(script, session) for name, session in made.items()}


def told(script: Script, session: str) -> dict[str, Any]:
    """Return a session with its messages, and its document."""
    found = script.ask("GET", f"/v1/sessions/{session}?include=messages").json
    document = script.ask("GET", f"/v1/sessions/{session}/export").json
    pages = script.ask("GET", f"/v1/sessions/{session}/pages").json
    return {"session": found, "document": document, "disk": pages["tiers"]["disk"]}


def dead(instance: Instance) -> Any:
    """Return the dead letters."""
    return json.loads(instance.said("dead-letters", "list", "--json"))


def unfinished(instance: Instance, script: Script, made: dict[str, Any]) -> dict[str, Any]:
    """Stop who would do the work, ask for some, and return what was asked once it is in Redis."""
    for name in ("vector_search-0", "gpu_worker-0"):
        os.kill(instance.note(name)["pid"], signal.SIGSTOP)
    bus: Any = redis.Redis(unix_socket_path=str(instance.data_dir / "redis.sock"))
    before = length(bus)
    document = {"id": "unborn", "vector": [-9, 1, 0]}
    asked = (
        ("POST", "/v1/collections/points/documents", {"documents": [document]}),
        ("POST", EMBED, {"input": "a text that nobody embeds"}),
        ("POST", CHAT, {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
    )
    headers = {"Spillway-Resume": "300", "Spillway-Timeout": "30"}
    for each in asked:
        threading.Thread(target=_ask, args=(script, *each, headers), daemon=True).start()
    until_sync(lambda: length(bus) >= before + len(asked), "the work is in Redis")
    (points,) = [each for each in made["collections"] if each["name"] == "points"]
    writes = f"{{search.{points['id']}/0}}:writes"
    first = bus.xrange(writes)[0][1][b"w"]
    bus.xadd(writes, {"w": _REQUEST.sub(lambda m: m[0][:-4] + b"zzzz", first)})  # as another's
    queued = [job for name in LANES for job in _queued(bus, name)]
    return {"late": LATE, "queued": queued, "dead_letter": convict(instance, bus)}


def _queued(bus: Any, lane: str) -> list[str]:
    """Return the jobs of a lane, whose records are kept for ever: Redis would drop them before anyone opens them."""
    jobs = [fields[b"j"].decode() for _, fields in bus.xrange(lane)]
    for name in [key for job in jobs for key in bus.scan_iter(f"*{job}*")]:
        bus.persist(name)
    return jobs


def convict(instance: Instance, bus: Any) -> Any:
    """Write a dead letter as a conviction does, of a job like one that is queued; return how it is listed."""
    _, fields = bus.xrange(LANES[0])[0]
    job, tenant = fields[b"j"].decode(), "alpha"
    letter = {
        "job": f"{job[:-1]}{'0' if job[-1] != '0' else '1'}",
        "tenant": tenant,
        "payload": fields[b"p"],
        "items": fields[b"i"],
        "tokens": fields[b"n"],
        "code": "job_failed",
        "message": "RuntimeError: poisoned",
        "trace": "Traceback (most recent call last):\n  poisoned",
        "attempts": 3,
        "at": fields[b"d"],
    }
    bus.xadd(LANES[0].partition(":")[0] + ":dead", letter)
    (found,) = dead(instance)
    return found


def length(bus: Any) -> int:
    """Return how many entries the streams of jobs and writes hold."""
    names = [*bus.scan_iter("*:lane:*"), *bus.scan_iter("*:writes")]
    return sum(int(bus.xlen(name)) for name in names)


def _ask(script: Script, method: str, target: str, body: Any, headers: dict[str, str]) -> None:
    with contextlib.suppress(OSError, EOFError):
        script.ask(method, target, body, headers=headers)


def make(checkout: Checkout, folder: Path) -> dict[str, Any]:
    """Fill a data directory, kill all that runs on it, and return what must be found in it."""
    instance = Instance(checkout, folder, **SETTINGS).start()
    try:
        made = keys(instance)
        script = Script(instance.url, made["keys"]["alpha"])
        made |= collections(script)
        made["sessions"] = sessions(script)
        made |= unfinished(instance, script, made)
    finally:
        instance.kill()
    return made


def main() -> None:
    """Write the archive and the list of what is in it."""
    parser = argparse.ArgumentParser("python -m tests.guards.archive", description=__doc__)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the tree that makes the data")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spillway-guard-") as folder:
        directory = Path(folder) / "data"
        made = make(Checkout(args.checkout), directory)
        with tarfile.open(ARCHIVE, "w:gz") as archive:
            for name in KEPT:
                archive.add(directory / name, name)
    LIST.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
