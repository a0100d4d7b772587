"""Model cards: their tokenizers come from disk without the router's loop waiting for that disk."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

from common.bus import Bus
from common.registry.models import Models
from services.router.cards import Cards
from tests.support.scripted_generator import byte_tokenizer, card


def _path(directory: Path) -> Path:
    made = card()
    digest = hashlib.blake2b(f"{made.name}:{made.fingerprint}".encode(), digest_size=16)
    return directory / "cache" / "tokenizers" / f"{digest.hexdigest()}.json"


async def _writer(path: Path) -> int:
    """Open a pipe for writing as soon as somebody reads it."""
    for _ in range(3000):
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            await asyncio.sleep(0.02)
    raise AssertionError("nobody reads the file")


async def test_a_slow_disk_does_not_stop_the_loop(bus: Bus, tmp_path: Path) -> None:
    """While the file of a tokenizer is being read the loop goes on: here it gives the reader what it waits for."""
    text = byte_tokenizer().to_str().encode()
    await Models(bus).publish(card(), text)
    path = _path(tmp_path)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    cards = Cards(bus, str(tmp_path))
    reading = asyncio.create_task(cards.specs())
    pipe = await _writer(path)
    assert not reading.done()
    os.close(pipe)
    specs = await reading
    assert specs[card().name].path == str(path)
    assert path.is_file()
    assert path.read_bytes() == text


async def test_a_damaged_tokenizer_is_written_again(bus: Bus, tmp_path: Path) -> None:
    """A file that is not what the worker published is replaced."""
    text = byte_tokenizer().to_str().encode()
    await Models(bus).publish(card(), text)
    path = _path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(text[:100])
    await Cards(bus, str(tmp_path)).specs()
    assert path.read_bytes() == text
