"""The disk tier: what is kept is read again, after a kill at any byte too; budget, life, erasing, a full disk."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.clock import SYSTEM
from common.pages.identity import owner_id
from common.pages.keys import PageKey
from services.kv_store import metrics
from services.kv_store.disk.disk import Disk
from services.kv_store.disk.records import HEAD_BYTES, RecordHeader, decode, size_of
from services.kv_store.disk.segments import Damaged, InUse, Segments
from tests.conftest import PROFILE
from tests.faults.hostile.test_disk import Disk as SmallDisk

BUDGET = 1 << 22  # segments of 256 KiB
LATER = 1 << 50
OWNERS = b"", owner_id("one"), owner_id("other")
LIMITS = {OWNERS[1]: 600_000}


def key(number: int) -> PageKey:
    """The key of some page."""
    return PageKey(number.to_bytes(16, "big"), number % 2)


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[Segments]:
    """Empty segments."""
    made = Segments(tmp_path / "pages", BUDGET)
    yield made
    made.close()


def again(segments: Segments, budget: int = BUDGET) -> Segments:
    """The same directory, opened anew."""
    directory = segments._directory
    segments.close()
    return Segments(directory, budget)


def files(directory: Path) -> list[Path]:
    """The segments' files, oldest first."""
    return sorted(directory.glob("segment.*"))


@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1))
def test_a_header_is_read_or_refused(page: bytes, number: int, ends_ms: int) -> None:
    """A header comes back as written; with any bit flipped it is none."""
    head = RecordHeader(PageKey(page, number), number, ends_ms, number, owner_id(str(number)))
    data = head.encode()
    assert decode(data) == head
    erased = RecordHeader(None, number)
    assert decode(erased.encode()) == erased
    for bit in range(8 * HEAD_BYTES):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert decode(bytes(flipped)) is None
    assert size_of(number) % HEAD_BYTES == 0


def test_kept_over_a_restart(segments: Segments) -> None:
    """Pages of any size come back with their ends of life, now and after the next start; another writer is second."""
    values = {key(n): bytes([n]) * size for n, size in enumerate((0, 1, 63, 64, 65, 5000))}
    for n, (name, value) in enumerate(values.items()):
        assert segments.put(name, value, LATER + n) == []
    segments.put(key(5), b"other", LATER + 50)  # which renews its life
    for _ in range(2):
        assert len(segments) == len(values)
        assert {name: segments.get(name) for name in values} == {
            name: (value, LATER + n + 45 * (n == 5), b"")
            for n, (name, value) in enumerate(values.items())
        }
        assert segments.get(key(99)) is None
        segments = again(segments)
    assert segments.skipped == 0
    segments.close()


def test_a_directory_has_one_name(segments: Segments, tmp_path: Path) -> None:
    """A directory's name is the same at every start, and another directory has another."""
    name = segments.identity
    other = Segments(tmp_path / "other", BUDGET)
    assert other.identity != name
    other.close()
    segments = again(segments)
    assert segments.identity == name
    segments.close()


def test_one_process_a_directory(segments: Segments) -> None:
    """A second opener is refused, until the first has closed."""
    with pytest.raises(InUse, match="in use by another process"):
        Segments(segments._directory, BUDGET)
    segments = again(segments)
    segments.close()


def test_the_budget_holds(segments: Segments) -> None:
    """Files never have more than the budget; the oldest pages make room, and are told."""
    rng, held = random.Random(7), set[PageKey]()
    for n in range(400):
        dropped = segments.put(key(n), rng.randbytes(rng.randrange(60_000)), LATER)
        held |= {key(n)}
        assert set(dropped) <= held
        held -= set(dropped)
        on_disk = sum(path.stat().st_size for path in files(segments._directory))
        assert on_disk == segments.used_bytes <= BUDGET
    assert set(segments.ends()) == held
    assert min(int.from_bytes(name.id, "big") for name in held) > 200
    with pytest.raises(ValueError, match="expected less than a sixteenth"):
        segments.put(key(999), bytes(BUDGET // 16), LATER)
    small = again(segments, 80_000)
    with pytest.raises(ValueError, match="tier's 80000"):
        small.put(key(999), bytes(20_000), LATER)
    small.close()


def test_emptied_files_are_compacted(segments: Segments) -> None:
    """A file of which little is left gives its space back, and what is left is kept."""
    for n in range(60):
        segments.put(key(n), bytes([n]) * 60_000, LATER)
    segments.erase([key(n) for n in range(30) if n % 4])
    kept = [n for n in range(60) if n >= 30 or n % 4 == 0]
    for n in range(60, 78):
        assert segments.put(key(n), bytes([n]) * 60_000, LATER) == []
    for _ in range(2):
        assert all(segments.get(key(n)) == (bytes([n]) * 60_000, LATER, b"") for n in kept)
        segments = again(segments)
    segments.close()


def test_erased_is_off_the_disk(segments: Segments) -> None:
    """No byte of an erased page, nor its id, is in any file; the others are whole, and stay so at the next start."""
    for n in range(20):
        segments.put(key(n), b"rosebud%02d" % n * 1000, LATER)
    gone = [key(n) for n in range(0, 20, 3)]
    assert segments.erase([*gone, key(99)], sync=True) == len(gone)
    assert segments.search(set(gone)) == (20 - len(gone), 0)
    assert segments.search({key(1)}) == (20 - len(gone), 1)
    segments = again(segments)
    data = b"".join(path.read_bytes() for path in files(segments._directory))
    for n in range(20):
        erased = key(n) in gone
        assert (b"rosebud%02d" % n not in data) == erased
        assert (key(n).id not in data) == erased or n == 0
        assert (segments.get(key(n)) is None) == erased
    segments.close()


def test_an_erasure_that_leaves_bytes_is_an_error(
    segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that keeps the bytes it was told to overwrite is found out when they are read back."""
    segments.put(key(1), b"rosebud" * 100, LATER)
    monkeypatch.setattr("services.kv_store.disk.segments.write", lambda *_: None)
    with pytest.raises(OSError, match="still holds an erased page's bytes"):
        segments.erase([key(1)], sync=True)


def test_what_expired_is_erased(segments: Segments) -> None:
    """Pages go when their time is over."""
    for n in range(10):
        segments.put(key(n), b"x" * 1000, 100 + n)
    assert segments.expire(105) == [key(n) for n in range(6)]
    assert segments.expire(105) == []
    segments = again(segments)
    assert set(segments.ends()) == {key(n) for n in range(6, 10)}
    segments.close()


def test_a_file_cut_at_any_byte(tmp_path: Path) -> None:
    """After a cut anywhere, the records before it are there, what it cut is gone, and the tier goes on."""
    values = {key(n): bytes([65 + n]) * size for n, size in enumerate((10, 64, 0, 200))}
    origin = Segments(tmp_path / "origin", BUDGET)
    for name, value in values.items():
        origin.put(name, value, LATER)
    origin.close()
    data = files(tmp_path / "origin")[0].read_bytes()
    ends, at = [], 0
    for value in values.values():
        at += size_of(len(value))
        ends.append(at)
    assert ends[-1] == len(data)
    for cut in range(len(data) + 1):
        directory = tmp_path / "cut"
        directory.mkdir(exist_ok=True)
        (directory / "segment.0000000001").write_bytes(data[:cut])
        segments = Segments(directory, BUDGET)
        whole = [name for name, end in zip(values, ends, strict=True) if end <= cut]
        assert list(segments.ends()) == whole
        assert all(segments.get(name) == (values[name], LATER, b"") for name in whole)
        assert segments.skipped == (cut not in (0, *ends))
        segments.put(key(9), b"next", LATER)
        segments = again(segments)
        assert list(segments.ends()) == [*whole, key(9)]
        assert segments.skipped == 0
        segments.close()


@given(st.data())
def test_damage_stays_where_it_is(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes overwritten anywhere cost the records they are in, which are never returned; all others are."""
    directory = tmp_path_factory.mktemp("damage")
    sizes = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=8))
    segments, starts, at = Segments(directory, BUDGET), [], 0
    for n, size in enumerate(sizes):
        segments.put(key(n), bytes([65 + n]) * size, LATER)
        starts.append(at)
        at += size_of(size)
    segments.close()
    path = files(directory)[0]
    whole = bytearray(path.read_bytes())
    first = data.draw(st.integers(0, len(whole) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=200))[: len(whole) - first]
    whole[first : first + len(noise)] = noise
    path.write_bytes(whole)
    segments = Segments(directory, BUDGET)
    for n, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        hit = start < first + len(noise) and first < start + HEAD_BYTES + size
        try:
            found = segments.get(key(n))
        except Damaged:
            found = None
            assert segments.get(key(n)) is None
        assert found == (bytes([65 + n]) * size, LATER, b"") or (found is None and hit)
    segments.close()


def test_a_kill_in_mid_compaction(segments: Segments, tmp_path: Path) -> None:
    """A page that is in two files, as a kill may leave it, is one page, and erasing it erases both."""
    segments.put(key(1), b"rosebud" * 100, LATER)
    segments = again(segments)
    first = files(segments._directory)[0]
    first.with_name("segment.0000000002").write_bytes(first.read_bytes())
    segments = again(segments)
    assert len(segments) == 1
    assert segments.get(key(1)) == (b"rosebud" * 100, LATER, b"")
    segments.erase([key(1)])
    assert not any(b"rosebud" in path.read_bytes() for path in files(segments._directory))
    segments.close()


class Life(RuleBasedStateMachine):
    """Any order of puts, reads, renewals, erasures, expiry and restarts against a dict.

    Of three owners one has a limit: it never has more, and no other's page makes one of its own leave.
    """

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.root = tempfile.TemporaryDirectory(prefix="sw-disk-")
        self.segments = Segments(Path(self.root.name), BUDGET)
        self.segments.owners.limits = LIMITS
        self.model: dict[PageKey, tuple[bytes, int, bytes]] = {}

    @rule(n=st.integers(0, 30), size=st.integers(0, 200_000), ends_ms=st.integers(1, 100))
    def put(self, n: int, size: int, ends_ms: int) -> None:
        owner = OWNERS[n % 3]
        dropped = self.segments.put(key(n), bytes([n]) * size, ends_ms, owner)
        value = self.model[key(n)][0] if key(n) in self.model else bytes([n]) * size
        self.model[key(n)] = value, ends_ms, owner
        for name in dropped:
            assert owner in LIMITS or self.model[name][2] not in LIMITS
            del self.model[name]
        held = [len(value) for value, _, whose in self.model.values() if whose in LIMITS]
        assert sum(map(size_of, held)) <= LIMITS[OWNERS[1]]

    @rule(numbers=st.lists(st.integers(0, 30), max_size=8))
    def erase(self, numbers: list[int]) -> None:
        there = {key(n) for n in numbers} & self.model.keys()
        assert self.segments.erase([key(n) for n in numbers]) == len(there)
        for name in there:
            del self.model[name]

    @rule(now_ms=st.integers(0, 60))
    def expire(self, now_ms: int) -> None:
        over = {name for name, (_, ends_ms, _) in self.model.items() if ends_ms <= now_ms}
        assert set(self.segments.expire(now_ms)) == over
        for name in over:
            del self.model[name]

    @rule()
    def restart(self) -> None:
        self.segments = again(self.segments)
        self.segments.owners.limits = LIMITS
        assert self.segments.skipped == 0

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        assert self.segments.get(name) == self.model[name]

    @invariant()
    def counted(self) -> None:
        assert self.segments.ends() == {name: ends for name, (_, ends, _) in self.model.items()}
        assert self.segments.used_bytes <= BUDGET

    def teardown(self) -> None:
        self.segments.close()
        self.root.cleanup()


TestLife = Life.TestCase

WRITER = """
import sys
from pathlib import Path
from common.pages.keys import PageKey
from services.kv_store.disk.segments import Segments
segments = Segments(Path(sys.argv[1]), 1 << 22)
for n in range(1 << 30):
    name = PageKey(n.to_bytes(16, "big"), 0)
    segments.put(name, n.to_bytes(4, "big") * 5000, 1 << 50)
    if n % 3 == 0:
        segments.erase([name])
    print(n, flush=True)
"""


def test_a_process_killed_as_it_writes(tmp_path: Path, seed: int) -> None:
    """After kill -9 at any moment all that was said to be kept is there, in order, and nothing that was erased."""
    rng, root = random.Random(seed), Path(__file__).parents[3]
    for round_ in range(100 if PROFILE == "soak" else 4):
        directory = tmp_path / str(round_)
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE, cwd=root
        )
        assert process.stdout is not None
        said, until = -1, rng.randrange(1, 600)
        for line in process.stdout:
            said = int(line)
            if said >= until:
                process.send_signal(signal.SIGKILL)
                break
        said = max([said, *(int(x) for x in process.stdout.read().split(b"\n")[:-1])])
        process.wait()
        process.stdout.close()
        segments = Segments(directory, BUDGET)
        held = sorted(int.from_bytes(name.id, "big") for name in segments.ends())
        assert [n for n in held if n % 3 == 0 and n <= said] == []
        oldest = held[0]
        assert set(held) >= {n for n in range(oldest, said + 1) if n % 3}
        assert said - oldest >= min(said, 150) - 3  # what the budget holds
        for n in held:
            with contextlib.suppress(*([Damaged] if n % 3 == 0 else [])):  # killed as it was erased
                found = segments.get(PageKey(n.to_bytes(16, "big")))
                assert found == (n.to_bytes(4, "big") * 5000, LATER, b"")
        segments.close()


async def test_a_full_disk(tmp_path: Path) -> None:
    """A disk that takes no more refuses and says so; reading and erasing go on; then it takes pages again."""
    disk = await Disk.open(tmp_path / "pages", BUDGET, SYSTEM)
    assert await disk.put(key(1), b"x" * 30_000, LATER)
    refused = metrics.REFUSED._value.get()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        assert not await disk.put(key(2), b"y" * 30_000, LATER)
        assert not await disk.put(key(3), b"z", LATER)  # it was not asked again
        assert metrics.REFUSED._value.get() == refused + 1
        assert await disk.get(key(1)) == (b"x" * 30_000, LATER, b"")
        assert files(tmp_path / "pages")[0].stat().st_size == size_of(
            30_000
        )  # nothing torn is left
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert await disk.erase([key(1)]) == 1
    disk._again_at = 0.0
    assert await disk.put(key(2), b"y" * 30_000, LATER)
    assert not await disk.put(key(4), bytes(BUDGET), LATER)  # larger than a segment
    assert await disk.usage() == (1, size_of(30_000) + size_of(30_000))
    await disk.close()
    await disk.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small file system")
async def test_a_file_system_without_space() -> None:
    """On a disk that others fill up the tier refuses, keeps what it has, compacts nothing away, and recovers."""
    small = SmallDisk(4)
    try:
        directory = small.path / "pages"
        disk = await Disk.open(directory, 1 << 30, SYSTEM)
        held = 0
        while await disk.put(key(held), bytes([held % 256]) * 100_000, LATER):
            held += 1
        assert held > 30
        assert await disk.get(key(0)) == (bytes(100_000), LATER, b"")
        small.fill()
        assert await disk.erase([key(n) for n in range(5)]) == 5
        disk._again_at = 0.0
        assert not await disk.put(key(held), b"x" * 100_000, LATER)
        await disk.close()
        disk = await Disk.open(directory, 1 << 30, SYSTEM)
        assert set(await disk.ends()) == {key(n) for n in range(5, held)}
        small.empty()
        assert not await disk.put(key(held), b"x" * 1_000_000, LATER)
        disk._again_at = 0.0
        assert await disk.put(key(held), b"x" * 10_000, LATER)
        await disk.close()
    finally:
        small.close()


async def test_what_the_tier_tells(tmp_path: Path) -> None:
    """What left the disk is told once, whatever the reason: damaged, expired, erased, or for room."""
    disk = await Disk.open(tmp_path / "pages", BUDGET, SYSTEM)
    for n in range(4):
        await disk.put(key(n), bytes([n]) * 1000, 100 + n)
    path = files(tmp_path / "pages")[0]
    data = bytearray(path.read_bytes())
    data[size_of(1000) + HEAD_BYTES + 7] ^= 1
    path.write_bytes(data)
    assert await disk.get(key(1)) is None
    assert disk.gone == {key(1)}
    await disk.expire(100)
    assert await disk.ends() == {key(2): 102, key(3): 103}
    assert await disk.renew(key(3), 104)
    assert not await disk.renew(key(0), 104)
    assert await disk.ends([key(1), key(3)]) == {key(3): 104}
    await disk.erase([key(2)])
    assert await disk.search([key(2), key(3)]) == (1, 1)
    assert disk.gone == {key(0), key(1), key(2)}
    disk.gone.clear()
    for n in range(4, 80):
        await disk.put(key(n), bytes(100_000), 1000)
    assert key(3) in disk.gone
    assert set(await disk.ends()) == {key(n) for n in range(4, 80)} - disk.gone
    await disk.close()
    first = await Disk.open(tmp_path / "pages", BUDGET, SYSTEM)
    with pytest.raises(InUse):
        await Disk.open(tmp_path / "pages", BUDGET, SYSTEM)
    await first.close()
