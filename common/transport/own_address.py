"""The address at which other machines reach this one."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

_ELSEWHERE = "203.0.113.1", 9  # in no network, so that it stands for any other machine


def own_address() -> str:
    """Return what this machine's name stands for; where that is loopback, as Debian's is, the address of its way out.

    A pod's and a container's name stands for its own address. Without a way out it is loopback: nobody else can call.
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
