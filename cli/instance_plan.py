"""The plan of `spillway up`: every setting checked and every command line made before anything starts."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli import chat_model, embedded
from cli.chat_model import ChatModel
from cli.instance import Instance
from cli.planned_services import PlannedReplica, PlannedServices, fingerprint, read_plan_file
from cli.process import python
from common.config import (
    Common,
    RouterConfig,
    SearchConfig,
    StoreConfig,
    SupervisorConfig,
    WorkerConfig,
    load,
)
from common.devices import detect, lanes, torch_version, within_reach
from common.errors import ConfigError
from common.placement import overflow_workers, place, place_host
from common.types.helper_address import channel_kind

REDIS, REDIS_PAGES = "redis", "redis-pages"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
FREE_PORTS = 23000, 29999  # below the ports that Linux and macOS use for outgoing connections


@dataclass(frozen=True)
class PlannedProcess:
    """One process to run, with its own variables, on `cores` (empty: any); lower stages start earlier, stop later."""

    name: str
    argv: list[str]
    stage: int
    death_signal: int = signal.SIGKILL
    env: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class InstancePlan:
    """The plan of one instance: its directory, its processes, and its addresses.

    `overflow_workers` is the number of overflow workers, `lanes` the embedding lanes of this machine; with
    `host_helper` a process attends on the host for the gpu_worker. The services are those of the deployment plan
    `planned`, if there is one; `further_ports` are the ports of its routers after the first.
    """

    instance: Instance
    config: SupervisorConfig
    router: RouterConfig
    port: int
    file: str | None
    env: dict[str, str]
    chat: ChatModel
    lanes: tuple[str, ...]
    overflow_workers: int
    host_helper: bool
    planned: PlannedServices | None = None
    further_ports: tuple[int, ...] = ()

    @property
    def embedded(self) -> bool:
        """True if this instance runs the bus' server."""
        return not self.config.redis_url

    @property
    def embedded_pages(self) -> bool:
        """True if this instance runs the server for KV pages."""
        return not self.config.pages_url

    @property
    def url(self) -> str:
        """The router's URL for clients on this machine."""
        scheme = "https" if self.router.tls_cert else "http"
        host = self.router.host
        if host in {"0.0.0.0", "::", ""}:
            host = "127.0.0.1"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def open_to_all(self) -> bool:
        """True if requests need no key."""
        return self.router.keys == "off" or (
            self.router.keys == "auto" and self.router.host in LOOPBACK
        )

    def _flags(self, index: int, instance: int = 0) -> list[str]:
        flags = ["--data-dir", str(self.instance.data_dir), "--instance", str(instance)]
        if self.file:
            flags += ["--config", str(Path(self.file).resolve())]
        if self.config.health_port:
            flags += ["--health-port", str(self.config.health_port + index)]
        return flags

    def redis(self) -> PlannedProcess:
        """Return the embedded server, after writing its config."""
        path = embedded.write_config(self.instance, self.config)
        server = embedded.binary(self.config)
        return PlannedProcess(REDIS, [str(server), str(path)], 0, signal.SIGTERM)

    def redis_pages(self) -> PlannedProcess:
        """Return the embedded server for KV pages, after writing its config."""
        path = embedded.write_pages_config(self.instance, self.config)
        return PlannedProcess(REDIS_PAGES, [str(embedded.binary(self.config)), str(path)], 0)

    def services(self) -> list[PlannedProcess]:
        """Return the services; the router has the highest stage: it drains while the others work."""
        if self.planned is not None:
            return [
                self._of_plan(self.planned, index, replica)
                for index, replica in enumerate(self.planned.replicas())
            ]
        after = 3 + self.overflow_workers
        worker = [*self._flags(2), "--chat-model", self.chat.value]
        parts = [
            PlannedProcess("vector_search", python("services.vector_search", *self._flags(1)), 1),
            PlannedProcess("kv_store", python("services.kv_store", *self._flags(after)), 1),
            PlannedProcess("gpu_worker", python("services.gpu_worker", *worker), 1),
        ]
        for number in range(self.overflow_workers):
            flags = [*self._flags(3 + number, number), "--role", "overflow"]
            parts.append(
                PlannedProcess(f"cpu_worker-{number}", python("services.cpu_worker", *flags), 1)
            )
        if self.host_helper:
            flags = [*self._flags(after + 1), "--role", "host"]
            parts.append(PlannedProcess("host_helper", python("services.cpu_worker", *flags), 1))
        flags = [*self._flags(0), "--port", str(self.port)]
        return [*parts, PlannedProcess("router", python("services.router", *flags), 2)]

    def _of_plan(
        self, planned: PlannedServices, index: int, replica: PlannedReplica
    ) -> PlannedProcess:
        service = replica.entry.service
        flags = self._flags(index, replica.number)
        if service == "gpu_worker":
            flags += ["--chat-model", planned.chat(replica.entry).value or chat_model.NONE]
        elif service == "router":
            port = (self.port, *self.further_ports)[replica.number]
            flags += ["--port", str(port)]
        return PlannedProcess(
            replica.name,
            python(f"services.{service}", *flags),
            2 if service == "router" else 1,
            env=replica.env,
            cores=replica.cores,
        )


def _check_port(host: str, port: int) -> int:
    """Return a port for the router, for 0 a free one; ConfigError with the reason if it cannot use this port."""
    try:
        info = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"SPILLWAY_HOST is {host!r}: {error.strerror}; expected an address of this machine"
        ) from None
    if port == 0:
        return _free_port(info[0], info[4])
    try:
        _probe(info[0], info[4])
    except OSError as error:
        raise ConfigError(
            f"port {port} on {host}: {error.strerror}; expected a free one (SPILLWAY_PORT or --port)"
        ) from None
    return port


def _free_port(family: int, address: tuple[Any, ...]) -> int:
    """Return a free port of an address, outside the range for outgoing connections.

    The router binds the port some seconds later, and no outgoing connection may get it meanwhile.
    """
    for _ in range(200):
        port = random.SystemRandom().randint(*FREE_PORTS)
        with contextlib.suppress(OSError):
            _probe(family, (address[0], port, *address[2:]))
            return port
    raise ConfigError(
        f"no free port from {FREE_PORTS[0]} to {FREE_PORTS[1]} on {address[0]}; expected one (--port)"
    )


def _probe(family: int, address: tuple[Any, ...]) -> None:
    """Listen at an address for a moment; OSError if that fails."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)


def make(args: Mapping[str, Any], env: Mapping[str, str]) -> InstancePlan:
    """Check all that can be checked before the start; ConfigError names the fault."""
    file = args.get("config") or env.get("SPILLWAY_CONFIG") or None
    given = {name: args.get(name) for name in ("data_dir", "port", "sample", "chat_model")}
    config = load(SupervisorConfig, env, file=file, args=given)
    router = load(RouterConfig, env, file=file, args=given)
    worker = load(WorkerConfig, env, file=file, args=given)
    others: tuple[type[Common], ...] = (SearchConfig, StoreConfig)
    for cls in others:
        load(cls, env, file=file, args=given)
    machine = within_reach(detect(), device=worker.device, env=env, torch=torch_version())
    place(machine, threads=worker.threads, cores=worker.cores)  # wrong settings are refused now
    place_host(machine, worker.host_cores)
    planned = _planned(args, env, file, given)
    chat = chat_model.choose(worker) if planned is None else _planned_chat(planned)
    for name in ("tls_cert", "tls_key"):
        path = getattr(router, name)
        if path and not Path(path).is_file():
            raise ConfigError(f"SPILLWAY_{name.upper()} is {path!r}: expected a file in PEM format")
    instance = Instance.at(config.data_dir)
    child_env = {**env, "SPILLWAY_LOG_FORMAT": "json", "PYTHONUNBUFFERED": "1"}
    if not (config.redis_url and config.pages_url):
        embedded.binary(config)
    if not config.redis_url:
        child_env["SPILLWAY_REDIS_URL"] = instance.redis_url
    if not config.pages_url:
        child_env["SPILLWAY_PAGES_URL"] = instance.pages_url
    return InstancePlan(
        instance=instance,
        config=config,
        router=router,
        port=router.port,
        file=file,
        env=child_env,
        chat=chat,
        lanes=lanes(machine, overflow=config.overflow_workers != 0),
        overflow_workers=overflow_workers(machine, config.overflow_workers),
        host_helper=(
            bool(worker.host_socket)
            and channel_kind(worker.host_socket) == "unix"  # else it runs on another machine
            and worker.host_attention != "off"
        ),
        planned=planned,
    )


def _planned(
    args: Mapping[str, Any], env: Mapping[str, str], file: str | None, given: Mapping[str, Any]
) -> PlannedServices | None:
    """Return the services of the deployment plan that `args` name, else None; ConfigError if the plan cannot run."""
    where = args.get("plan")
    if not where:
        return None
    plan = read_plan_file(where)
    planned = PlannedServices(plan, str(where), env, file, given)
    if not args.get("other_machine"):
        device = load(WorkerConfig, env, file=file).device
        planned.check_machine(fingerprint(device=device))
    asked = load(SupervisorConfig, env, file=file).overflow_workers
    if asked not in ("auto", plan.replicas("cpu_worker")):
        raise ConfigError(
            f"SPILLWAY_OVERFLOW_WORKERS is {asked}, and {where} has {plan.replicas('cpu_worker')} of cpu_worker; "
            "expected one of them only"
        )
    return planned


def _planned_chat(planned: PlannedServices) -> ChatModel:
    """Return the chat model of a plan's first generating gpu_worker; ConfigError if a model is missing."""
    models = [planned.chat(entry) for entry in planned.plan.of_service("gpu_worker")]
    return next((model for model in models if model.value), models[0])


def with_port(plan: InstancePlan) -> InstancePlan:
    """Return the plan with a new port, free now."""
    port = _check_port(plan.router.host, plan.port)
    more = plan.planned.plan.replicas("router") - 1 if plan.planned else 0
    further = tuple(_check_port(plan.router.host, 0) for _ in range(more))
    return dataclasses.replace(plan, port=port, further_ports=further)
