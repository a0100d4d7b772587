"""The processes of a deployment plan on this machine: their environments, checked before any of them starts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cli import chat_model
from common.config import (
    PREFIX,
    Common,
    RouterConfig,
    SearchConfig,
    StoreConfig,
    WorkerConfig,
    load,
)
from common.devices import Machine, detect, parse_cores, torch_version, within_reach
from common.errors import ConfigError
from common.metrics import version
from planner.deployment import (
    DeploymentPlan,
    MachineFingerprint,
    PlanError,
    PlannedService,
    ServiceName,
    read_plan,
)

CONFIGS: Mapping[ServiceName, type[Common]] = {
    "router": RouterConfig,
    "gpu_worker": WorkerConfig,
    "cpu_worker": WorkerConfig,
    "vector_search": SearchConfig,
    "kv_store": StoreConfig,
}
# Settings of a replica's place and addresses, which only the supervisor sets.
NOT_PLANNED = frozenset(
    {
        "data_dir",
        "redis_url",
        "pages_url",
        "port",
        "health_port",
        "replica",
        "config",
        "host_secret",
    }
)
_FILE_BYTES = 1 << 20


class PlannedReplica(NamedTuple):
    """One replica: its process' name, its entry, its number among those of its service, and its environment."""

    name: str
    entry: PlannedService
    number: int
    env: dict[str, str]
    cores: tuple[int, ...]


def fingerprint(machine: Machine | None = None, *, device: str = "auto") -> MachineFingerprint:
    """Return the fingerprint of a machine, by default this one, as in plans made here."""
    found = within_reach(machine or detect(), device=device, env=os.environ, torch=torch_version())
    return MachineFingerprint(
        cores=found.usable_cores,
        chips=len(found.accelerators),
        memory_bytes=found.memory_limit_bytes or found.memory_bytes,
        product=version(),
    )


def read_plan_file(path: str | Path) -> DeploymentPlan:
    """Return the plan of a file; ConfigError names the fault, its place and the expected form."""
    place = Path(path)
    try:
        if place.exists() and not place.is_file():  # a device or a pipe may never end
            raise ConfigError(f"{place} is no regular file; expected a deployment plan")
        if place.stat().st_size > _FILE_BYTES:
            raise ConfigError(
                f"{place} is larger than {_FILE_BYTES} bytes; expected a deployment plan"
            )
        return read_plan(place.read_bytes(), str(place))
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror}; expected a deployment plan") from None
    except PlanError as error:
        raise ConfigError(str(error)) from None


class PlannedServices:
    """The services of a plan on this machine; `replicas()` are in the order of the plan's services."""

    def __init__(
        self,
        plan: DeploymentPlan,
        where: str,
        env: Mapping[str, str],
        file: str | None,
        args: Mapping[str, Any],
    ) -> None:
        """Check a plan against the given settings; ConfigError names a setting that contradicts the plan.

        `where` is the plan's file, for messages; `env`, `file` and `args` give settings, as in `common.config.load`.
        """
        self.plan, self.where = plan, where
        self._env, self._file, self._args = env, file, args
        if plan.replicas("kv_store") > 1:
            raise ConfigError(
                f"{where}: {plan.replicas('kv_store')} replicas of kv_store; expected one on one machine, "
                "whose disk of pages it keeps"
            )
        for entry in plan.services:
            self._check(entry)

    def check_machine(self, here: MachineFingerprint) -> None:
        """Raise ConfigError if the plan was made for another machine than `here`."""
        if others := self.plan.machine.differences(here):
            raise ConfigError(
                f"{self.where}: the plan is for another machine, {'; '.join(others)} here; expected a plan made for "
                "this one (`spillway profile`, `spillway plan deployment`), or --other-machine"
            )

    def config(self, entry: PlannedService) -> Common:
        """Return the configuration of an entry's replicas; ConfigError if a value cannot be used."""
        env = {**self._env, **self.plan.environment(entry)}
        return load(CONFIGS[entry.service], env, file=self._file)

    def chat(self, entry: PlannedService) -> chat_model.ChatModel:
        """Return the chat model of a gpu_worker's entry; ConfigError if there is no model of that name."""
        config = load(
            WorkerConfig, {**self._env, **self.plan.environment(entry)}, file=self._file,
            args={"chat_model": None if "SPILLWAY_CHAT_MODEL" in entry.settings else self._args.get("chat_model")},
        )  # fmt: skip
        return chat_model.choose(config)

    def replicas(self) -> Iterator[PlannedReplica]:
        """Yield every replica; the first of an entry has the entry's name, further ones a number behind it."""
        numbers: Counter[str] = Counter()
        for entry in self.plan.services:
            env = self.plan.environment(entry)
            for index in range(entry.replicas):
                name = entry.label if entry.replicas == 1 else f"{entry.label}-{index}"
                cores = parse_cores(entry.cores) if entry.cores else ()
                yield PlannedReplica(name, entry, numbers[entry.service], env, cores)
                numbers[entry.service] += 1

    def _check(self, entry: PlannedService) -> None:
        cls, planned = CONFIGS[entry.service], self.plan.environment(entry)
        for variable in planned:
            name = variable.removeprefix(PREFIX).lower()
            if name in NOT_PLANNED or name not in cls.__struct_fields__:
                raise ConfigError(
                    f"{self.where}: {entry.label}: {variable} is no setting that a plan makes for {entry.service}"
                )
        try:
            wanted = load(cls, planned)
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {entry.label}: {error}") from None
        given = load(cls, self._env, file=self._file, args=self._args)
        default = cls()
        for variable in planned:
            name = variable.removeprefix(PREFIX).lower()
            asked, plans = getattr(given, name), getattr(wanted, name)
            if asked not in (getattr(default, name), plans):
                raise ConfigError(
                    f"{variable} is {asked!r}, and {plans!r} for {entry.label} in {self.where}; "
                    "expected one of them only"
                )
        self._check_cores(entry)

    def _check_cores(self, entry: PlannedService) -> None:
        if not entry.cores:
            return
        here = detect().cores
        try:
            others = set(parse_cores(entry.cores)) - set(here)
        except ValueError as error:
            raise ConfigError(
                f"{self.where}: {entry.label}: cores: {error}; expected a list such as 0-3,8"
            ) from None
        if others:
            raise ConfigError(
                f"{self.where}: {entry.label}: cores {entry.cores!r}; expected some of those this process may run on"
            )


def shown_plan(plan: DeploymentPlan) -> str:
    """Return a plan in a few words."""
    parts = [f"{plan.replicas(name)} {name}" for name in CONFIGS if plan.replicas(name)]
    return f"plan {plan.digest}: {', '.join(parts)}"


def as_note(plan: DeploymentPlan) -> dict[str, Any]:
    """Return a plan in the form for the supervisor's note."""
    found: dict[str, Any] = msgspec.to_builtins(plan)
    return found
