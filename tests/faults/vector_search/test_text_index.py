"""A process that is killed while it writes leaves an index of texts that equals its documents."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from tests.support.vectors import ask, shard
from tests.unit.vector_search.test_text_index import indexed, stored

KILLS = 8
# Stores and removes documents for ever, and says what is synced.
WRITER = """
import random, sys
from pathlib import Path
from tests.support.vectors import shard, write
from tests.unit.vector_search.test_text_index import WORDS, made

one = shard(Path(sys.argv[1]))
number = int(one.applied.split("-")[0])
while True:
    for _ in range(random.randint(1, 3)):
        number += 1
        rng = random.Random(number)
        texts = [" ".join(rng.choices(WORDS, k=rng.randint(0, 30))) for _ in range(rng.randint(1, 4))]
        upserts = [made(f"d{rng.randrange(200)}", texts) for _ in range(8)]
        deletes = [f"d{rng.randrange(200)}" for _ in range(3)]
        one.apply(f"{number}-0", write(number, upserts, deletes, request=f"r{number}"))
    one.sync()
    if not number % 5:
        one.snapshot()
    print(number, flush=True)
"""


async def test_kills_leave_texts_and_documents_equal(tmp_path: Path) -> None:
    """At each kill -9 what was synced is there, and the words found are those of the chunks stored."""
    rng = random.Random(5)
    for _ in range(KILLS):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WRITER, str(tmp_path), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        synced = 0
        for _ in range(rng.randint(1, 12)):
            synced = int(await process.stdout.readline())
        process.kill()
        await process.wait()
        one = shard(tmp_path)
        assert int(one.applied.split("-")[0]) >= synced
        found = one.search(ask([], 10, mode="text", texts=["kiwi zinc"]))
        assert (len(found.hits[0]), found.text_indexed) == (10, 1.0)
        one.close()
        database = tmp_path / "0" / "documents.sqlite"
        assert indexed(database) == stored(database)
