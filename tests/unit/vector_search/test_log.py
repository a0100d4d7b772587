from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from services.vector_search.write_log import WriteLog, format_id, parse_id

ENTRIES = [((5, 0), b"one"), ((5, 1), b""), ((70, 3), b"x" * 40)]


def _filled(directory: Path) -> Path:
    log = WriteLog(directory)
    for entry, payload in ENTRIES:
        log.append(entry, payload)
    log.sync()
    log.close()
    return next(directory.glob("writes.*"))


def test_a_log_cut_at_any_byte_gives_its_whole_records(tmp_path: Path) -> None:
    """Whatever was cut off, the records before it are read, and new ones follow them."""
    data = _filled(tmp_path / "full").read_bytes()
    for size in range(len(data)):
        directory = tmp_path / str(size)
        directory.mkdir()
        (directory / "writes.0000000000").write_bytes(data[:size])
        log = WriteLog(directory)
        sound = list(log.entries())
        assert sound == ENTRIES[: len(sound)]
        log.append((99, 0), b"new")
        log.close()
        log = WriteLog(directory)
        assert (list(log.entries()), log.torn) == ([*sound, ((99, 0), b"new")], 0)
        log.close()
        shutil.rmtree(directory)


def test_any_flipped_bit_ends_the_log_there(tmp_path: Path) -> None:
    """A damaged record and what follows it are never returned; what precedes it is, and the damage is counted."""
    data = _filled(tmp_path / "full").read_bytes()
    for bit in range(3, len(data) * 8, 7):  # every byte, each of its bits somewhere
        directory = tmp_path / str(bit)
        directory.mkdir()
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        (directory / "writes.0000000000").write_bytes(damaged)
        log = WriteLog(directory)
        sound = list(log.entries())
        assert sound == ENTRIES[: len(sound)]
        assert (len(sound) < len(ENTRIES), log.torn) == (True, 1)
        log.close()
        shutil.rmtree(directory)


def test_rollback_and_rotation(tmp_path: Path) -> None:
    """What was taken back is gone; segments covered by a snapshot are removed, later ones stay."""
    log = WriteLog(tmp_path)
    log.append((1, 0), b"a")
    log.sync()
    log.append((2, 0), b"b")
    log.rollback()
    log.append((3, 0), b"c")
    old = log.rotate()
    assert [entry for entry, _ in log.entries()] == [(1, 0), (3, 0)]
    log.append((4, 0), b"d")
    log.sync()
    log.remove(old)
    assert list(log.entries()) == [((4, 0), b"d")]
    assert log.size == sum(path.stat().st_size for path in tmp_path.glob("writes.*"))
    mark = log.mark()
    log.append((5, 0), b"e")
    log.sync()
    log.rollback(mark)
    log.close()
    again = WriteLog(tmp_path)
    assert [entry for entry, _ in again.entries()] == [(4, 0)]
    again.close()


def test_ids_compare_as_numbers() -> None:
    """9-9 < 10-0; anything that is no id is refused."""
    ids = [(random.Random(1).randrange(99), n) for n in range(20)]
    assert [parse_id(format_id(entry)) for entry in ids] == ids
    assert parse_id("9-9") < parse_id("10-0") < parse_id("10-10")
    for bad in ("", "-", "a-1", "1-b", "-1-2", "1-2-3", "\u0661-1"):
        with pytest.raises(ValueError, match="expected"):
            parse_id(bad)
