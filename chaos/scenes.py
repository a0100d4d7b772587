"""Scenes of F1: the processes that run, the processes that die, and the requests sent meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bench.mesh import processes
from bench.mesh.processes import Service
from chaos.chat_kinds import Conversation, Stream
from chaos.clients import Done
from chaos.grounded import Grounded
from chaos.kinds import Embed, Ingest, Kind, Parcels, Search
from chaos.pipelined import Pipelined, amid_retrievals
from chaos.stages import Stage
from chaos.tiers import SMALL

SIMULATED = ("--device", "sim", "--beta", "0.01")
SIMULATED_CHAT = ("--device", "sim", "--beta", "0.005")
SIMULATED_SLOWLY = (
    "--device",
    "sim",
    "--beta",
    "0.02",
)  # so that several are met between retrievals
REAL = ("--device", "cpu")


@dataclass(frozen=True, slots=True)
class Scene:
    """One run's processes and load; `env` is told to all of them.

    `another` are the victims beside which one more of the kind lives, or without which nobody waits. A kill waits for
    operations that are `ready` for it; a victim of `during` is stopped before, until a job of that kind waits for it.
    """

    name: str
    victims: tuple[str, ...]
    another: frozenset[str]
    services: Callable[[bool], list[Service]]
    kinds: Callable[[bool], list[Kind]]
    env: Mapping[str, str] = field(default_factory=dict)
    ready: Callable[[Done], bool] = lambda _done: True
    during: Mapping[str, Stage] = field(default_factory=dict)

    @property
    def beside(self) -> frozenset[str]:
        """Return the victims beside which another worker of the same lane lives."""
        return frozenset(name for name in self.another if name.startswith("gpu_worker"))


def _embedding_services(simulated: bool) -> list[Service]:
    device = SIMULATED if simulated else REAL
    return [
        processes.router("router-1"),
        processes.router("router-2"),
        processes.gpu_worker("gpu_worker", *device),
        processes.cpu_worker("cpu_worker", *device),
        processes.vector_search(),
    ]


def _chat_services(simulated: bool, simulation: tuple[str, ...] = SIMULATED_CHAT) -> list[Service]:
    device = simulation if simulated else REAL
    return [
        processes.router("router-1"),
        processes.router("router-2"),
        processes.chat_worker("gpu_worker-1", *device),
        processes.chat_worker("gpu_worker-2", *device),
        processes.kv_store(),
        processes.vector_search(),
    ]


def _all_services(simulated: bool) -> list[Service]:
    device = SIMULATED if simulated else REAL
    return [*_chat_services(simulated), processes.cpu_worker("cpu_worker", *device)]


def _conversing() -> list[Service]:
    workers = [processes.chat_worker(f"gpu_worker-{n}", *REAL) for n in (1, 2)]
    return [processes.router(), *workers, processes.kv_store()]


def _helped() -> list[Service]:
    socket = "host.sock"
    worker = processes.chat_worker(
        "gpu_worker-1", *REAL, HOST_ATTENTION="full", HOST_SOCKET=socket, STEP_TOKENS="2048"
    )
    return [processes.router(), worker, processes.host_helper(socket), processes.kv_store()]


def _chat_kinds(simulated: bool) -> list[Kind]:
    # A small pool where the run is short: every answer of it is asked for alone before the first kill.
    if simulated:
        return [Stream(count=4), Conversation(count=1), Grounded(count=2)]
    return [Stream(count=18), Conversation(count=6), Grounded(count=6)]


EMBEDDINGS = Scene(
    "embeddings",
    ("router-1", "router-2", "gpu_worker", "cpu_worker", "vector_search", "redis"),
    frozenset({"router-1", "router-2"}),
    _embedding_services,
    lambda _simulated: [Embed(), Parcels(), Search(), Ingest()],
)
CHAT = Scene(
    "chat",
    (
        "router-1",
        "router-2",
        "gpu_worker-1",
        "gpu_worker-2",
        "kv_store",
        "vector_search",
        "redis",
        "redis-pages",
    ),
    frozenset({"router-1", "router-2", "gpu_worker-1", "gpu_worker-2", "redis-pages"}),
    _chat_services,
    _chat_kinds,
    SMALL,
)
# A router dies between two retrievals, a worker after passages were replaced, the search during a later retrieval.
PIPELINED = Scene(
    "pipelined",
    ("router-1", "router-2", "gpu_worker-1", "gpu_worker-2", "vector_search"),
    CHAT.another,
    lambda simulated: _chat_services(simulated, SIMULATED_SLOWLY),
    lambda simulated: [Pipelined(count=2 if simulated else 8)],
    {"SPILLWAY_DTYPE": "fp32"},
    ready=amid_retrievals,
    during={"vector_search": "later search"},
)
# The same tokens whatever happens to their pages: exact mode, and long conversations only. Never simulated.
CONVERSATIONS = Scene(
    "conversations",
    ("gpu_worker-1", "gpu_worker-2", "kv_store", "redis", "redis-pages"),
    CHAT.another,
    lambda _simulated: _conversing(),
    lambda simulated: [Conversation(count=2 if simulated else 6, turns=4 if simulated else 8)],
    SMALL | {"SPILLWAY_EXACT": "1"},
)
# All decoding is attended on the host, by the helper while it lives. Never simulated.
HELPED = Scene(
    "helped",
    ("gpu_worker-1", "host_helper"),
    frozenset({"host_helper"}),
    lambda _simulated: _helped(),
    CONVERSATIONS.kinds,
    {**CONVERSATIONS.env, "SPILLWAY_HOST_KV_BYTES": str(40 << 20)},
)
ALL = Scene(
    "all",
    (*CHAT.victims, "cpu_worker"),
    CHAT.another,
    _all_services,
    lambda simulated: [*EMBEDDINGS.kinds(simulated), *_chat_kinds(simulated)],
    SMALL,
)
