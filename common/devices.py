"""Detection of this machine's cores and accelerators from the kernel's files, and of the lanes for them.

This is WindVE's device detector: the kinds of devices determine the lanes. Detection takes milliseconds and loads no
torch, since the command line and the supervisor call it. A core is a hardware thread, which Linux numbers as a CPU; a
physical core is one or more of them.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

ABILITIES = (
    "avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8",
    "asimd", "bf16", "i8mm", "sve",
)  # fmt: skip
_LARGEST = 8191  # Linux can be built for one core more
_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


class Accelerator(msgspec.Struct, frozen=True):
    """One device beside the CPUs; `path` is its device file, empty if this process has none for it."""

    kind: Literal["nvidia", "ascend"]
    name: str
    path: str = ""
    node: int | None = None


class NumaNode(msgspec.Struct, frozen=True):
    """One NUMA node and all of its cores."""

    index: int
    cores: tuple[int, ...]


class Machine(msgspec.Struct, frozen=True):
    """The machine's devices. `cores` are those this process may run on; `physical` groups them by physical core.

    `quota_cores` and `memory_limit_bytes` are the tightest limits of this process' cgroups, None without a limit.
    """

    cores: tuple[int, ...]
    physical: tuple[tuple[int, ...], ...]
    nodes: tuple[NumaNode, ...]
    accelerators: tuple[Accelerator, ...] = ()
    abilities: tuple[str, ...] = ()
    quota_cores: float | None = None
    memory_bytes: int = 0
    memory_limit_bytes: int | None = None

    @property
    def usable_cores(self) -> int:
        """Return the number of threads that can compute at once: the cores, but at most the quota; at least 1."""
        quota = math.inf if self.quota_cores is None else self.quota_cores
        return max(1, math.floor(min(len(self.cores), quota)))

    @property
    def arm(self) -> bool:
        """True on a 64-bit ARM processor."""
        return "asimd" in self.abilities


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the cores, rising, of a list in the kernel's notation, "0-3,8"; ValueError for other text."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,4})(?:-([0-9]{1,4}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last <= _LARGEST:
            raise ValueError(f"{part.strip()!r} is neither a core's number nor a range of them")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def show_cores(cores: Iterable[int]) -> str:
    """Return cores in the kernel's notation: "0-3,8"."""
    runs: list[list[int]] = []
    for core in sorted(set(cores)):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def detect(root: Path = Path("/"), affinity: Iterable[int] | None = None) -> Machine:
    """Return the devices by the kernel's files below `root`; facts that the files lack are absent, not errors.

    `affinity` are the cores on which the scheduler lets this process run, by default the system's answer.
    """
    allowed = set(os.sched_getaffinity(0) if affinity is None else affinity)
    groups = _Groups(root)
    cores = tuple(sorted((allowed & groups.cores) or allowed))
    memory = re.search(r"^MemTotal:\s*([0-9]+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return Machine(
        cores=cores,
        physical=_physical(root, cores),
        nodes=_nodes(root, cores),
        accelerators=(*_nvidia(root), *_ascend(root)),
        abilities=_abilities(root),
        quota_cores=groups.quota_cores,
        memory_bytes=int(memory[1]) * 1024 if memory else 0,
        memory_limit_bytes=groups.memory_limit_bytes,
    )


def torch_version() -> str:
    """Return the installed torch's version, without loading it; "" without torch."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def unused(accelerator: Accelerator, *, device: str, env: Mapping[str, str], torch: str) -> str:
    """Return the reason why no worker computes on an accelerator, or "" if workers do.

    `device` is SPILLWAY_DEVICE, `env` the workers' environment, `torch` the version of their torch.
    """
    if accelerator.kind != "nvidia":
        return "no worker computes on this kind"
    if not accelerator.path:
        return (
            "it has no device file here: not given to this container, or not used since the start"
        )
    if device in {"cpu", "sim"}:
        return f"SPILLWAY_DEVICE is {device}"
    if torch.endswith("+cpu"):
        return f"the installed torch, {torch}, is for CPUs only"
    if env.get("CUDA_VISIBLE_DEVICES", "0").strip() in {"", "-1"}:
        return "CUDA_VISIBLE_DEVICES hides it"
    return ""


def within_reach(machine: Machine, *, device: str, env: Mapping[str, str], torch: str) -> Machine:
    """Return the machine as its workers use it: without the accelerators that are `unused`."""
    used = (
        each
        for each in machine.accelerators
        if not unused(each, device=device, env=env, torch=torch)
    )
    return msgspec.structs.replace(machine, accelerators=tuple(used))


def lanes(machine: Machine, overflow: bool = True) -> tuple[str, ...]:
    """Return the classes of embedding lanes: `gpu` and `cpu` with an accelerator and `overflow`, else `gpu` alone.

    Without an accelerator `overflow` is ignored: a second lane would share the first one's cores. The only lane is
    called `gpu` even then, since the name is that of a role.
    """
    return ("gpu", "cpu") if overflow and machine.accelerators else ("gpu",)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> int:
    found = re.search(r"-?[0-9]+", text)
    return int(found[0]) if found else -1


def _cores(text: str) -> tuple[int, ...]:
    try:
        return parse_cores(text)
    except ValueError:
        return ()


def _physical(root: Path, cores: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Group cores by physical core, in the order of the lowest core."""
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = (
        {core, *_cores(_read(root / topology.format(core)))}.intersection(cores) for core in cores
    )
    return tuple(sorted({tuple(sorted(group)) for group in siblings}))


def _nodes(root: Path, cores: tuple[int, ...]) -> tuple[NumaNode, ...]:
    """Return the nodes that have cores; one node of all `cores` if the kernel does not place each core."""
    files = root.glob("sys/devices/system/node/node[0-9]*/cpulist")
    found = sorted((_number(path.parent.name), _cores(_read(path))) for path in files)
    if set(cores) <= {core for _, its in found for core in its}:
        return tuple(NumaNode(index, its) for index, its in found if its)
    return (NumaNode(0, cores),)


def _abilities(root: Path) -> tuple[str, ...]:
    pattern = r"^(?:flags|Features)\s*:(.*)$"  # x86, ARM
    found = re.search(pattern, _read(root / "proc/cpuinfo"), re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    return tuple(name for name in ABILITIES if name in flags)


def _device_files(root: Path, name: str) -> dict[int, str]:
    files = (path.name for path in root.glob(f"dev/{name}[0-9]*"))
    return {_number(file): f"/dev/{file}" for file in sorted(files) if file[len(name) :].isdigit()}


def _nvidia(root: Path) -> Iterator[Accelerator]:
    """Yield devices with a device file, by number; then those that only the driver lists, as in some containers."""
    files = _device_files(root, "nvidia")
    told: dict[int, Accelerator] = {}
    for index, path in enumerate(sorted(root.glob("proc/driver/nvidia/gpus/*/information"))):
        facts = dict(re.findall(r"^([\w ]+):[ \t]*(.*?)[ \t]*$", _read(path), re.MULTILINE))
        bus = path.parent.name.lower()
        node = _number(_read(root / "sys/bus/pci/devices" / bus / "numa_node"))
        minor = _number(facts.get("Device Minor", str(index)))
        told[minor] = Accelerator(
            "nvidia",
            facts.get("Model", "NVIDIA"),
            files.get(minor, ""),
            node if node >= 0 else None,
        )
    for minor, file in sorted(files.items()):
        yield told.get(minor, Accelerator("nvidia", "NVIDIA", file))
    yield from (each for minor, each in sorted(told.items()) if minor not in files)


def _ascend(root: Path) -> Iterator[Accelerator]:
    for _, file in sorted(_device_files(root, "davinci").items()):
        yield Accelerator("ascend", "Ascend", file)


class _Groups:
    """The limits of this process' cgroups, versions 1 and 2: the tightest of its own group and all groups above."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._paths: dict[str, str] = {}
        for line in _read(root / "proc/self/cgroup").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            self._paths.update(dict.fromkeys(controllers.split(","), path))

    def _files(self, controller: str, name: str) -> Iterator[str]:
        """Yield a file's text in the group and in those above it, "" where the file is missing.

        A container may see its own group as the top one, under a path that exists only on the host.
        """
        mounts = [controller] if controller else ["", "unified"]  # version 2 beside version 1
        parts = [part for part in self._paths.get(controller, "").split("/") if part]
        if ".." in parts:
            parts = []
        for mount in mounts:
            for length in range(len(parts), -1, -1):
                directory = self._root.joinpath("sys/fs/cgroup", mount, *parts[:length])
                yield _read(directory / name)

    @property
    def quota_cores(self) -> float | None:
        """The seconds of computing that the quota allows per second; None without a quota."""
        lines = list(self._files("", "cpu.max"))
        v1 = (self._files("cpu", f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        lines += [f"{quota} {period}" for quota, period in zip(*v1, strict=True)]
        pairs = (re.fullmatch(r"([0-9]+) ([1-9][0-9]*)", line) for line in lines)
        return min((int(pair[1]) / int(pair[2]) for pair in pairs if pair), default=None)

    @property
    def memory_limit_bytes(self) -> int | None:
        """The bytes that this process may use; None without a limit."""
        lines = [*self._files("", "memory.max"), *self._files("memory", "memory.limit_in_bytes")]
        limits = (int(line) for line in lines if line.isascii() and line.isdigit())
        return min((limit for limit in limits if limit < _UNLIMITED), default=None)

    @property
    def cores(self) -> set[int]:
        """The cores that this process may use; without a limit, all that Linux can have."""
        found = [set(_cores(text)) for text in self._files("", "cpuset.cpus.effective") if text]
        return set(range(_LARGEST + 1)).intersection(*found)
