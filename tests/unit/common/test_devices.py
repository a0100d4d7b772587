"""The device detector on made-up machines: what the kernel's files say, and nothing that they do not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.devices import (
    Accelerator,
    Machine,
    NumaNode,
    detect,
    lanes,
    parse_cores,
    show_cores,
    unused,
    within_reach,
)

GPU = Accelerator("nvidia", "NVIDIA L4", "/dev/nvidia0", 1)
CORES = st.sets(st.integers(0, 8191), max_size=40)


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write files below a root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def topology(groups: dict[int, str]) -> dict[str, str]:
    """Return the files that say which cores are hardware threads of one."""
    place = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {
        place.format(core): f"{text}\n" for text in groups.values() for core in parse_cores(text)
    }


def two_nodes(root: Path) -> Path:
    """Return a machine with 2 nodes of 4 physical cores, two threads each, and two GPUs, one without its file."""
    card = "Model: \t\t {}\nIRQ:\nBus Location: \t {}\nDevice Minor: \t {}\n"
    return tree(
        root,
        {
            "sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
            "sys/devices/system/node/node1/cpulist": "4-7,12-15\n",
            "sys/devices/system/node/node2/cpulist": "\n",  # memory only
            **topology({core: f"{core},{core + 8}" for core in range(8)}),
            "proc/driver/nvidia/gpus/0000:C1:00.0/information": card.format("NVIDIA L4", "c1", 0),
            "proc/driver/nvidia/gpus/0000:01:00.0/information": card.format("NVIDIA T4", "01", 1),
            "sys/bus/pci/devices/0000:c1:00.0/numa_node": "1\n",
            "sys/bus/pci/devices/0000:01:00.0/numa_node": "-1\n",
            "dev/nvidia0": "",
            "dev/nvidia1-made-up": "",
            "dev/nvidiactl": "",
            "dev/nvidia-uvm": "",
            "proc/meminfo": "MemTotal:       24684096 kB\nMemFree: 1 kB\n",
            "proc/cpuinfo": "processor : 0\nflags\t\t: fpu avx2 avx512f amx_bf16\n",
            "proc/self/cgroup": "0::/user.slice\n",
            "sys/fs/cgroup/user.slice/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user.slice/memory.max": "max\n",
        },
    )


def test_a_gpu_and_two_nodes(tmp_path: Path) -> None:
    """Everything is found, and only devices with a file can be reached."""
    found = detect(two_nodes(tmp_path), range(16))

    assert found == Machine(
        cores=tuple(range(16)),
        physical=tuple((core, core + 8) for core in range(8)),
        nodes=(NumaNode(0, (0, 1, 2, 3, 8, 9, 10, 11)), NumaNode(1, (4, 5, 6, 7, 12, 13, 14, 15))),
        accelerators=(GPU, Accelerator("nvidia", "NVIDIA T4")),
        abilities=("avx2", "avx512f", "amx_bf16"),
        memory_bytes=24684096 * 1024,
    )
    assert found.usable_cores == 16


def test_affinity_bounds_what_is_used(tmp_path: Path) -> None:
    """Physical cores are made of the cores this process has; nodes are the machine's."""
    found = detect(two_nodes(tmp_path), {1, 2, 9})

    assert found.physical == ((1, 9), (2,))
    assert (found.usable_cores, len(found.nodes)) == (3, 2)


def test_a_container_of_version_2(tmp_path: Path) -> None:
    """One and a half cores of quota make one thread; of nested groups the tightest limit counts."""
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/one\n",
            "sys/fs/cgroup/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/one/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/cpuset.cpus.effective": "0-5\n",
            "sys/fs/cgroup/pod/one/cpuset.cpus.effective": "2-3,9\n",
            "sys/fs/cgroup/pod/memory.max": "max\n",
            "sys/fs/cgroup/pod/one/memory.max": "1073741824\n",
        },
    )

    found = detect(root, range(8))

    assert (found.quota_cores, found.usable_cores) == (1.5, 1)
    assert found.cores == (2, 3)
    assert found.memory_limit_bytes == 1 << 30


@pytest.mark.parametrize("seen", ["docker/abc", ""])
def test_a_container_of_version_1(tmp_path: Path, seen: str) -> None:
    """Limits are found whether the container sees the host's hierarchy or its own group as the top."""
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n",
            f"sys/fs/cgroup/cpu/{seen}/cpu.cfs_quota_us": "250000\n",
            f"sys/fs/cgroup/cpu/{seen}/cpu.cfs_period_us": "100000\n",
            f"sys/fs/cgroup/memory/{seen}/memory.limit_in_bytes": "2147483648\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"
            if seen
            else "2147483648\n",
        },
    )

    found = detect(root, range(4))

    assert (found.quota_cores, found.usable_cores) == (2.5, 2)
    assert found.memory_limit_bytes == 2 << 30


def test_both_versions(tmp_path: Path) -> None:
    """Version 2 beside version 1 lies in a folder of its own; the tighter of them counts."""
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu:/a\n0::/b\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/unified/b/cpu.max": "200000 100000\n",
        },
    )

    assert detect(root, range(8)).quota_cores == 2.0


def test_a_group_outside_of_what_is_seen(tmp_path: Path) -> None:
    """A path that leads out of the hierarchy is not followed; what is seen of it counts."""
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../other\n",
            "sys/fs/other/cpu.max": "100000 100000\n",
            "sys/fs/cgroup/cpu.max": "300000 100000\n",
        },
    )

    assert detect(root, range(8)).quota_cores == 3.0


def test_no_limit_of_version_1(tmp_path: Path) -> None:
    """A quota of -1 is none, nor is a limit beyond any memory."""
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu:/\n5:memory:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )

    found = detect(root, {0})

    assert (found.quota_cores, found.memory_limit_bytes) == (None, None)


def test_an_arm_machine_with_an_npu(tmp_path: Path) -> None:
    """ARM lists its abilities as Features; an Ascend device is shown, and no worker computes on it."""
    root = tree(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd sve i8mm bf16\nCPU part\t: 0xd01\n",
            "dev/davinci0": "",
            "dev/davinci_manager": "",
            "sys/devices/system/node/node0/cpulist": "0-63\n",
            "sys/devices/system/node/node1/cpulist": "64-127\n",
        },
    )

    found = detect(root, range(128))

    assert found.abilities == ("asimd", "bf16", "i8mm", "sve")
    assert found.arm
    assert found.physical == tuple((core,) for core in range(128))
    assert [each.path for each in found.accelerators] == ["/dev/davinci0"]
    assert lanes(within_reach(found, device="auto", env={}, torch="2.13.0")) == ("gpu",)


def test_a_system_without_sys(tmp_path: Path) -> None:
    """Where the kernel tells nothing, the cores are one node without threads, and nothing is made up."""
    assert detect(tmp_path, {3, 1}) == Machine(
        cores=(1, 3), physical=((1,), (3,)), nodes=(NumaNode(0, (1, 3)),)
    )


def test_files_of_nonsense(tmp_path: Path) -> None:
    """Whatever the files hold, detection ends without an error."""
    names = [str(path.relative_to(tmp_path)) for path in two_nodes(tmp_path).rglob("*")]
    for text in ("", "nonsense\n", "0-99999999999\n", "-1 -1\n", "100000 0\n", ":::\n", "\x00\xff"):
        tree(tmp_path, {name: text for name in names if (tmp_path / name).is_file()})

        assert detect(tmp_path, range(4)).cores == (0, 1, 2, 3)


def test_this_machine() -> None:
    """What runs here can be described, and uses no more than it may."""
    here = detect()

    assert sorted(core for group in here.physical for core in group) == list(here.cores)
    assert 1 <= here.usable_cores <= len(here.cores)


@given(cores=CORES)
def test_lists_of_cores(cores: set[int]) -> None:
    """A list written is read back; an empty one is no list."""
    text = show_cores(cores)

    if cores:
        assert parse_cores(text) == tuple(sorted(cores))
    else:
        assert text == ""


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "1-", "8192", "0-99999", "٣"])
def test_what_is_no_list_of_cores(text: str) -> None:
    """What is no list is refused with the part that is wrong."""
    with pytest.raises(ValueError, match="neither a core's number nor a range"):
        parse_cores(text)


@given(st.integers(1, 64), st.none() | st.floats(0.01, 100))
def test_threads_come_from_affinity_and_quota(cores: int, quota: float | None) -> None:
    """Never more threads than either allows, never none, and no core of quota unused."""
    numbers = tuple(range(cores))
    machine = Machine(
        numbers, tuple((n,) for n in numbers), (NumaNode(0, numbers),), quota_cores=quota
    )

    usable = machine.usable_cores

    assert 1 <= usable <= cores
    if quota is not None:
        assert usable <= max(1, quota)
        assert usable == cores or usable + 1 > math.floor(quota)


@given(st.integers(0, 3), st.booleans())
def test_lanes(count: int, wanted: bool) -> None:
    """Two lanes where there are two kinds of device and they are wanted; several of one kind are one kind."""
    machine = Machine((0,), ((0,),), (NumaNode(0, (0,)),), accelerators=(GPU,) * count)

    assert lanes(machine, overflow=wanted) == (("gpu", "cpu") if count and wanted else ("gpu",))


@pytest.mark.parametrize(
    ("device", "env", "torch", "why"),
    [
        ("auto", {}, "2.13.0", ""),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "1"}, "2.13.0+cu130", ""),
        ("cpu", {}, "2.13.0", "SPILLWAY_DEVICE is cpu"),
        ("sim", {}, "2.13.0", "SPILLWAY_DEVICE is sim"),
        ("auto", {}, "2.13.0+cpu", "the installed torch, 2.13.0+cpu, is for CPUs only"),
        ("auto", {"CUDA_VISIBLE_DEVICES": ""}, "2.13.0", "CUDA_VISIBLE_DEVICES hides it"),
        ("auto", {"CUDA_VISIBLE_DEVICES": "-1"}, "2.13.0", "CUDA_VISIBLE_DEVICES hides it"),
    ],
)
def test_what_no_worker_uses(device: str, env: dict[str, str], torch: str, why: str) -> None:
    """An accelerator counts where a worker would compute on it; else it is said why none does."""
    machine = Machine((0,), ((0,),), (NumaNode(0, (0,)),), accelerators=(GPU,))

    assert unused(GPU, device=device, env=env, torch=torch) == why
    assert len(lanes(within_reach(machine, device=device, env=env, torch=torch))) == 2 - bool(why)


def test_a_device_without_a_file() -> None:
    """What only the driver knows is not ours, as in a container that was given no device."""
    why = unused(Accelerator("nvidia", "NVIDIA L4"), device="auto", env={}, torch="2.13.0")

    assert "no device file here" in why
