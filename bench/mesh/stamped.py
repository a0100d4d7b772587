"""Run a service that notes when each request reaches a stage: `python -m bench.mesh.stamped FILE MODULE FLAGS…`.

The service is what `python -m MODULE` runs, with calls wrapped that a request passes on its way. All moments are by
`time.monotonic()`, which is one clock for all processes of a machine. FILE gets them as JSON when the service ends: by
stage, and by job.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

Moments = dict[str, dict[str, float]]
_moments: defaultdict[str, dict[str, float]] = defaultdict(dict)


def stamp(stage: str, job: str) -> None:
    """Note that a job reaches a stage now, unless it has been there."""
    _moments[stage].setdefault(job, time.monotonic())


def mark(stage: str) -> None:
    """Note that something reaches a stage now, by its number: for requests that come one after another."""
    _moments[stage][str(len(_moments[stage]))] = time.monotonic()


def read(path: Path) -> Moments:
    """Return the moments that a service has written: seconds by stage and job."""
    return msgspec.json.decode(path.read_bytes(), type=Moments)


def _around(
    owner: Any,
    name: str,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Call `before` with the arguments of every call of `owner.name`, and `after` with its result and these."""
    call = getattr(owner, name)

    async def awaited(*args: Any, **more: Any) -> Any:
        if before is not None:
            before(*args, **more)
        result = await call(*args, **more)
        if after is not None:
            after(result, *args, **more)
        return result

    def called(*args: Any, **more: Any) -> Any:
        if before is not None:
            before(*args, **more)
        result = call(*args, **more)
        if after is not None:
            after(result, *args, **more)
        return result

    wrapped = awaited if inspect.iscoroutinefunction(call) else called
    wrapped.__dict__.update(call.__dict__)  # such as the mark of a middleware
    setattr(owner, name, wrapped)


def _router() -> None:
    """Stamp received, accepted, parsed, admitted, heard and answered."""
    from common.transport.call_client import CallClient  # noqa: PLC0415
    from services.router.admission.controller import AdmissionController  # noqa: PLC0415
    from services.router.admission.request_runner import RequestRunner  # noqa: PLC0415
    from services.router.http.connection import ClientConnection  # noqa: PLC0415
    from services.router.http.middleware import RequestObserver  # noqa: PLC0415
    from services.router.http.quick_search import QuickSearches  # noqa: PLC0415
    from services.router.http.receiver import REQUEST_ID  # noqa: PLC0415

    arrived: dict[int, float] = {}
    begun: ContextVar[tuple[float, float]] = ContextVar("begun")

    def bytes_came(connection: Any, _data: bytes) -> None:
        arrived[id(connection)] = time.monotonic()
        mark("came")

    def begins(_observer: Any, request: Any, **_handler: Any) -> None:
        now = time.monotonic()
        mark("found")
        begun.set((arrived.get(id(request.protocol), now), now))

    def admits(_admission: Any, _caller: Any, _spec: Any, job: str) -> None:
        _moments["received"][job], _moments["accepted"][job] = begun.get()
        stamp("parsed", job)

    def admitted(_result: Any, _admission: Any, _caller: Any, _spec: Any, job: str) -> None:
        stamp("admitted", job)

    def heard(_event: Any, _runner: Any, job: str, *_more: Any) -> None:
        stamp("heard", job)

    def answers(_connection: Any, request: Any, *_more: Any) -> None:
        stamp("answered", request.get(REQUEST_ID, ""))
        mark("written")

    _around(ClientConnection, "data_received", before=bytes_came)
    _marks(QuickSearches, "begin", before="found")
    _marks(ClientConnection, "_answered", before="written")
    _around(RequestObserver, "middleware", before=begins)
    _around(AdmissionController, "_admit", before=admits, after=admitted)
    _around(RequestRunner, "wait", after=heard)
    _around(ClientConnection, "finish_response", before=answers)
    _marks(CallClient, "call", before="called")
    _marks(CallClient, "_take", before="returned")


def _marks(owner: Any, name: str, *, before: str = "", after: str = "") -> None:
    """Mark the stages at which a call begins and ends."""
    _around(
        owner, name,
        None if not before else lambda *_args, **_more: mark(before),
        None if not after else lambda _result, *_args, **_more: mark(after),
    )  # fmt: skip


def _searcher() -> None:
    """Mark what a search passes in the process that computes it."""
    from common.transport import call_server  # noqa: PLC0415
    from services.vector_search.index.exact_index import ExactIndex  # noqa: PLC0415
    from services.vector_search.index.graph_index import GraphIndex  # noqa: PLC0415
    from services.vector_search.shard import Shard  # noqa: PLC0415

    _marks(call_server._Served, "_take", before="taken")
    _marks(Shard, "search", before="batched", after="shown")
    for index in (ExactIndex, GraphIndex):
        _marks(index, "search", before="walked from", after="walked")
    _marks(call_server.Call, "reply", before="replied")


def _worker() -> None:
    """Stamp leased, begun, computed and finishing."""
    from common.worker.lease_reader import LeaseReader  # noqa: PLC0415
    from common.worker.leases import HeldLeases  # noqa: PLC0415
    from services.adapters.encode import loop  # noqa: PLC0415

    def leased(lease: Any, *_args: Any, **_more: Any) -> None:
        stamp("leased", lease.job)

    def begins(_model: Any, jobs: Sequence[Any]) -> None:
        for job in jobs:
            stamp("begun", job.lease.job)

    def computed(_result: Any, _model: Any, jobs: Sequence[Any]) -> None:
        for job in jobs:
            stamp("computed", job.lease.job)

    def finishes(_leases: Any, lease: Any) -> None:  # the first call of every end
        stamp("finishing", lease.job)

    _around(LeaseReader, "_lease", after=leased)
    _around(loop, "run_jobs", before=begins, after=computed)
    _around(HeldLeases, "current", before=finishes)


STAMPED = {
    "services.router": _router, "services.gpu_worker": _worker, "services.vector_search": _searcher,
}  # fmt: skip


def main() -> int:
    """Run the service to its end and write its stamps; return its exit status."""
    path, module = Path(sys.argv[1]), sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    STAMPED[module]()
    status: int = importlib.import_module(f"{module}.__main__").main()
    path.write_bytes(msgspec.json.encode(_moments))
    return status


if __name__ == "__main__":
    sys.exit(main())
