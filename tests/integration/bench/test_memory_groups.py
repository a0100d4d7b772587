"""Groups that limit the memory of a mesh: what the kernel is told, what it says, and what ends with them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.mesh.memory_groups import GroupUse, MemoryGroups, MemoryGroupsError
from cli.main import main

FILES = {
    1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    2: ("memory.max", "memory.peak", "memory.events"),
}


@pytest.fixture(params=FILES)
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Make new directories hold the files that the kernel makes in a group; few machines may make real groups."""
    made: int = request.param
    mkdir = Path.mkdir

    def group(
        folder: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False
    ) -> None:
        mkdir(folder, mode, parents, exist_ok)
        for name in (*FILES[made], "cgroup.procs"):
            (folder / name).write_text("")

    monkeypatch.setattr(Path, "mkdir", group)
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    return made


def _parent(folder: Path, version: int) -> Path:
    if version == 2:
        (folder / "cgroup.controllers").write_text("cpu memory\n")
        (folder / "cgroup.subtree_control").write_text("cpu\n")
    return folder


def test_a_process_is_limited_and_ends_with_its_group(tmp_path: Path, version: int) -> None:
    """A named process is put into its group, whose limit, peak and kills are told; others stay where they are."""
    parent = _parent(tmp_path, version)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with MemoryGroups(parent, {"router": 1 << 30}) as groups:
        assert groups.version == version
        groups.add("router", sleeper.pid)
        groups.add("redis", 1)
        (folder,) = (each for each in parent.iterdir() if each.is_dir())
        limit, peak, events = FILES[version]
        assert (folder / limit).read_text() == str(1 << 30)
        assert (folder / "cgroup.procs").read_text() == f"{sleeper.pid}\n"
        (folder / peak).write_text("4096\n")
        (folder / events).write_text("oom_kill_disable 0\noom_kill 2\n")
        assert groups.use() == {"router": GroupUse(1 << 30, 4096, 2)}
    assert sleeper.wait() == -signal.SIGKILL
    assert not [each for each in parent.iterdir() if each.is_dir()]
    if version == 2:
        assert (parent / "cgroup.subtree_control").read_text() == "+memory"


def test_a_plain_directory_is_refused(tmp_path: Path) -> None:
    """A directory that is no cgroup is named, with what is expected, and left as it was."""
    with pytest.raises(MemoryGroupsError, match="expected a cgroup directory"):
        MemoryGroups(tmp_path, {"router": 1}).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_is_given_no_cgroup_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`spillway bench F5 --cgroup` of a directory that is not there ends with one line that names the directory."""
    absent = tmp_path / "absent"
    assert main(["bench", "F5", "--cgroup", str(absent)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"spillway: {absent}: ")
    assert told.endswith("written\n")
    assert told.count("\n") == 1
