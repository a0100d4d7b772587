"""Hostile requests at what the document does not name: the dashboard's pages, and every process' health port."""

from __future__ import annotations

import pytest

from tests.guards.names import routes
from tests.support.hostile import wire
from tests.support.hostile.routes import NONSENSE, OPERATIONS, TRICKS
from tests.support.hostile.world import Witness, World

HEALTH = ("/livez", "/readyz", "/startupz", "/health", "/metrics")
LEAKS = (b"root:", b"Traceback", b"site-packages")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")
HEADERS = {
    "Content-Type": "text/\udcff",
    "Range": "bytes=9-1",
    "If-None-Match": "\udcff",
    "Expect": "y",
}


def _pages() -> list[str]:
    documented = {(operation.method, operation.template) for operation in OPERATIONS}
    served = {(each.split(" ", 1)[0], each.split(" ", 1)[1]) for each in routes()}
    return sorted(template for method, template in served - documented if method == "GET")


def _attack(port: int, template: str) -> None:
    parts = ("x", *TRICKS) if "{" in template else ("",)
    targets = [template.partition("{")[0] + part for part in parts]
    targets += [f"{targets[0]}?wait={raw.decode('latin-1')}" for raw in NONSENSE]
    targets += [f"/..{targets[0]}", f"//{targets[0]}", f"{targets[0]}/%00"]
    for target in targets:
        _harmless(wire.ask(port, "GET", target), target)
    for method in METHODS:
        _harmless(wire.ask(port, method, targets[0], b'{"x": 1}'), method)
    for name, text in HEADERS.items():
        _harmless(wire.ask(port, "GET", targets[0], headers={name: text}), name)
    for bad in (b"\xff", b"\x00", b" x y", b"?x=" + b"a" * 20_000):
        _harmless(wire.ask(port, "GET", targets[0].encode() + bad), bad[:8])


def _harmless(reply: wire.Reply, what: object) -> None:
    assert reply.status, what
    assert reply.status < 500 or reply.status == 503, (what, reply)
    assert not any(leak in reply.body for leak in LEAKS), (what, reply)


@pytest.mark.parametrize("template", _pages())
def test_pages(template: str, world: World, witness: Witness) -> None:
    """Whatever is asked of a page, the answer is the page or a refusal, and no file that is none of them."""
    _attack(world.port, template)


@pytest.mark.parametrize("template", HEALTH)
def test_health_ports(template: str, world: World) -> None:
    """Nor does a health port break, whichever process it belongs to; what is no HTTP is only in its log."""
    for process in world.processes:
        _attack(process.ports()["health_port"], template)
    assert world.alive()
