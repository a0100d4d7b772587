"""The address at which other machines reach this one."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

_ELSEWHERE = "203.0.113.1", 9  # an address for documentation: the route to any other machine


def own_address() -> str:
    """Return the address of this machine's name; if that is loopback, as on Debian, of its route to other machines.

    The name of a pod or a container has its own address. Without a route to other machines this is 127.0.0.1.
    """
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        if not ipaddress.ip_address(named).is_loopback:
            return named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect(_ELSEWHERE)  # sends nothing
        except OSError:
            return "127.0.0.1"
        return str(way.getsockname()[0])
