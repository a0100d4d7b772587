"""Requests of several jobs, and what they end with."""

from __future__ import annotations

from typing import Any

from common.wire.message import Message


class RequestWork(Message, frozen=True, tag="request"):
    """A request of several jobs, driven by the router that leases it (`kind` names the pipeline)."""

    kind: str
    tenant: str
    body: bytes


class RequestResult(Message, frozen=True, tag="request"):
    """What a request of several jobs ended with: a JSON body, or the jobs whose results make it up."""

    body: bytes = b""
    jobs: list[str] = []
    info: dict[str, Any] = {}
