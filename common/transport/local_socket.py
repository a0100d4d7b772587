"""The Unix socket of a process that takes calls, by which others on its machine reach it without TCP's work.

Its name lies in Linux' abstract namespace, so that no file is left behind. It is made of the process' token, but does
not tell it, since everyone on the machine can read such names.
"""

from __future__ import annotations

import hashlib
import socket


def listening(token: str) -> socket.socket | None:
    """Return the listening socket of the process with a token; None where the system has none of that kind."""
    return _made(token, listens=True)


def connected(token: str) -> socket.socket | None:
    """Return a connection to the process with a token; None if it does not run on this machine."""
    return _made(token, listens=False)


def _made(token: str, *, listens: bool) -> socket.socket | None:
    name = b"\0spillway-" + hashlib.blake2b(token.encode(), digest_size=16).hexdigest().encode()
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        return None
    made.settimeout(0)
    try:
        if listens:
            made.bind(name)
        else:
            made.connect(name)
    except OSError:
        made.close()
        return None
    return made
