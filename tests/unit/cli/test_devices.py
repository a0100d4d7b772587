"""`spillway devices`, on this machine and on one with an accelerator."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli import devices, instance_plan, main
from common.devices import Accelerator, Machine, NumaNode
from common.placement import DEMONSTRATION

MACHINE = Machine(
    cores=tuple(range(8)),
    physical=tuple((core, core + 4) for core in range(4)),
    nodes=(NumaNode(0, tuple(range(8))), NumaNode(1, tuple(range(8, 16)))),
    accelerators=(
        Accelerator("nvidia", "NVIDIA L4", "/dev/nvidia0", 1),
        Accelerator("ascend", "Ascend", "/dev/davinci0"),
    ),
    abilities=("avx2",),
    memory_bytes=3 << 29,
    memory_limit_bytes=1 << 30,
)


@pytest.fixture
def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run the command on MACHINE, with some variables set, and return what it prints."""
    monkeypatch.setattr(devices, "detect", lambda: MACHINE)
    monkeypatch.setattr(devices, "torch_version", lambda: "2.13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(*words: str, **env: str) -> str:
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(f"SPILLWAY_{name}", value)
            assert main.main(["devices", *words]) == 0
        return capsys.readouterr().out

    return run


def test_for_people(shown: Callable[..., str]) -> None:
    """One aligned line for each thing; what no worker uses says why."""
    assert shown().splitlines() == [
        "accelerators  /dev/nvidia0  NVIDIA L4, NUMA node 1",
        "              /dev/davinci0  Ascend; unused: no worker computes on this kind",
        "cores         0-7: 8 of 16, 4 physical",
        "threads       8 at once",
        "NUMA nodes    0: 0-7, 1: 8-15",
        "cgroup limits 1.0 GiB of memory",
        "abilities     avx2",
        "memory        1.5 GiB",
        "lanes         gpu, cpu: what the accelerator cannot finish in time spills to the CPUs",
        "overflow      workers: 1, on cores 6-7, threads of each: 2",
    ]


@pytest.mark.parametrize(
    ("env", "lanes", "overflow"),
    [
        ({"OVERFLOW_WORKERS": "0"}, "gpu: SPILLWAY_OVERFLOW_WORKERS is 0", "no worker"),
        ({"DEVICE": "cpu"}, "gpu: one kind of device, so one embedding lane", "no worker"),
        (
            {"DEVICE": "cpu", "OVERFLOW_WORKERS": "2"},
            "gpu: one kind of device, so one embedding lane",
            f"workers: 2, on any cores, threads of each: 8; {DEMONSTRATION}",
        ),
        (
            {"CORES": "1-3"},
            "gpu, cpu: what the accelerator cannot finish in time spills to the CPUs",
            "workers: 1, on cores 1-3, threads of each: 3",
        ),
    ],
)
def test_settings_decide_the_lanes(
    env: dict[str, str], lanes: str, overflow: str, shown: Callable[..., str]
) -> None:
    """The lanes are those that `up` would serve with the same variables."""
    lines = dict(line.split(maxsplit=1) for line in shown(**env).splitlines())

    assert (lines["lanes"], lines["overflow"]) == (lanes, overflow)


def test_for_programs(shown: Callable[..., str]) -> None:
    """JSON holds the machine, and what would be started on it."""
    found: dict[str, Any] = json.loads(shown("--json"))

    assert found["accelerators"][0]["node"] == 1
    assert [bool(each["unused"]) for each in found["accelerators"]] == [False, True]
    assert found["overflow"] == {"workers": 1, "cores": "6-7", "threads": 2}


def test_the_memory_of_the_host(shown: Callable[..., str]) -> None:
    """Asked for, memory is measured as the host tier takes it; unasked it is not."""
    found = json.loads(shown("--json", "--memory", HOST_CORES="0-1"))["host_memory"]

    assert found["page_kind"] in {"hugetlb", "transparent", "small"}
    assert found["latency_ns"] > 0
    assert found["bandwidth"] > 0
    assert found["threads"] == 2
    assert " ns a read, " in shown("--memory")
    assert "host_memory" not in json.loads(shown("--json"))


def test_a_bad_setting(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What `up` would refuse is refused here, with the same sentence."""
    monkeypatch.setenv("SPILLWAY_OVERFLOW_WORKERS", "some")

    assert main.main(["devices"]) == 2
    assert "'some': expected one of auto, 0 to 256" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "workers"), [("auto", 1), ("cpu", 0)])
def test_up_starts_what_overflows(
    device: str, workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside an accelerator that its workers use, `up` starts one overflow worker unasked."""
    monkeypatch.setattr(instance_plan, "detect", lambda: MACHINE)
    monkeypatch.setattr(instance_plan, "torch_version", lambda: "2.13.0")

    made = instance_plan.make({"data_dir": str(tmp_path)}, {"SPILLWAY_DEVICE": device})

    assert sum(part.name.startswith("cpu_worker-") for part in made.services()) == workers


@pytest.mark.parametrize(
    ("attention", "socket", "helpers"),
    [("auto", "h.sock", 1), ("off", "h.sock", 0), ("auto", "", 0), ("auto", "tcp://h:7070", 0)],
)
def test_up_starts_a_helper(attention: str, socket: str, helpers: int, tmp_path: Path) -> None:
    """With attention on the host and a socket, `up` starts a helper beside the gpu_worker; none of another machine."""
    env = {"SPILLWAY_HOST_ATTENTION": attention, "SPILLWAY_HOST_SOCKET": socket}

    made = instance_plan.make({"data_dir": str(tmp_path)}, env)

    found = [part.argv for part in made.services() if part.name == "host_helper"]
    assert len(found) == helpers
    assert all(argv[-2:] == ["--role", "host"] for argv in found)


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """The command describes whatever it runs on."""
    assert main.main(["devices"]) == 0
    assert "NUMA nodes" in capsys.readouterr().out
