"""Comparison of a deployment plan with the processes that a mesh reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from planner.deployment import SERVICES, DeploymentPlan, PlannedService

# Compared by the threads that compute, which a process counts itself.
_COUNTED = frozenset({"SPILLWAY_THREADS", "SPILLWAY_SEARCH_THREADS", "SPILLWAY_TEXT_PROCESSES"})
Default = Callable[[PlannedService, str], str]


class ReportedProcess(msgspec.Struct, frozen=True):
    """A process as GET /v1/mesh reports it: threads that compute, cores it may use, settings unlike the defaults."""

    service: str
    instance: str = "0"
    threads: int = 0
    cores: int = 0
    settings: dict[str, str] = {}


def differences(
    plan: DeploymentPlan, processes: Iterable[ReportedProcess], default: Default
) -> list[str]:
    """Return by what a mesh differs from its plan, a sentence each; none if it runs exactly what is planned.

    Every planned replica is matched with one process of its service: with one that is as planned, else with the one
    that differs least. `default(entry, variable)` is the value of a setting that a process does not report. Processes
    of services that no plan holds are not compared.
    """
    every = list(processes)
    left = {service: [each for each in every if each.service == service] for service in SERVICES}
    replicas = [entry for entry in plan.services for _ in range(entry.replicas)]
    unmet: list[PlannedService] = []
    for entry in replicas:  # those that are as planned first, so that none is taken for another
        rest = left[entry.service]
        fitting = [each for each in rest if not _unlike(plan, entry, each, default)]
        if fitting:
            rest.remove(fitting[0])
        else:
            unmet.append(entry)
    found = []
    for entry in unmet:
        rest = left[entry.service]
        if rest:
            wrong = [_unlike(plan, entry, each, default) for each in rest]
            index = min(range(len(rest)), key=lambda number: len(wrong[number]))
            found.append(f"{entry.label} {rest.pop(index).instance}: {'; '.join(wrong[index])}")
        else:
            found.append(f"{entry.label}: a replica is missing")
    for service, rest in left.items():
        found += [f"{service} {each.instance}: not planned" for each in rest]
    return found


def _unlike(
    plan: DeploymentPlan, entry: PlannedService, process: ReportedProcess, default: Default
) -> list[str]:
    """Return in what a process is not as an entry plans it."""
    found = []
    if entry.threads and process.threads != entry.threads:
        found.append(f"threads {process.threads}, planned {entry.threads}")
    if entry.cores and process.cores != (planned := count_cores(entry.cores)):
        found.append(f"cores {process.cores}, planned {planned}")
    for variable, value in plan.environment(entry).items():
        if variable in _COUNTED:
            continue
        reported = process.settings.get(variable, default(entry, variable))
        if reported != _last_part(value):
            found.append(f"{variable} {reported!r}, planned {_last_part(value)!r}")
    return found


def count_cores(text: str) -> int:
    """Return how many cores a list such as 0-3,8 holds; ValueError if it is none."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return len(cores)


def _last_part(value: str) -> str:
    """Return what a process reports of a value: of a path the last part."""
    return value.rstrip("/").rpartition("/")[2] or value
