"""What an answer to hostile input must look like, and what it must never hold."""

from __future__ import annotations

from tests.support.hostile.wire import Reply

_NEVER = ("Traceback", "site-packages", '.py"', "object at 0x")


def clear(reply: Reply, what: object = "") -> None:
    """AssertionError unless the reply is a success, or a clear error: OpenAI's shape, a code, one sentence."""
    assert reply.status, f"{what}: no reply"
    assert reply.status < 500 or reply.status == 503, (what, reply)
    if reply.status < 400:
        return
    assert reply.headers["content-type"].startswith("application/json"), (what, reply)
    error = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"}, (what, reply)
    assert isinstance(error["code"], str), (what, reply)
    assert error["code"], (what, reply)
    assert 0 < len(error["message"]) < 2000, (what, reply)
    assert "\n" not in error["message"], (what, reply)
    assert not any(word in error["message"] for word in _NEVER), (what, reply)
    assert reply.headers["x-request-id"], (what, reply)
    assert reply.headers["x-should-retry"] in {"true", "false"}, (what, reply)


def refused(reply: Reply, what: object = "", codes: set[str] | None = None) -> None:
    """AssertionError unless the reply is a clear refusal of what the client sent."""
    clear(reply, what)
    assert 400 <= reply.status < 500, (what, reply)
    if codes is not None:
        assert reply.code in codes, (what, reply)
