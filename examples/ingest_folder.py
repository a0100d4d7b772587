"""Put a folder's Markdown files into a collection; a second run sends only what changed.

`spillway ingest` does this with many formats, progress and pruning; this is the idea in thirty lines.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from spillway_client import AsyncSpillway, ConflictError

BATCH = 16


def documents(folder: Path) -> list[dict[str, str]]:
    """Return the folder's Markdown files, ids being their paths in it."""
    return [
        {"id": path.relative_to(folder).as_posix(), "text": path.read_text(encoding="utf-8")}
        for path in sorted(folder.rglob("*.md"))
    ]


async def ingest(client: AsyncSpillway, found: list[dict[str, str]], collection: str) -> int:
    """Store the documents; return how many were new or had changed."""
    stored = 0
    for start in range(0, len(found), BATCH):
        written = await client.documents(collection).add(found[start : start + BATCH])
        stored += sum(document.status == "stored" for document in written.data)
    return stored


async def main() -> None:
    """Ingest the folder given, twice."""
    found = documents(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
    async with AsyncSpillway(timeout_s=300) as client:
        try:
            await client.collections.create("example-folder")
        except ConflictError:
            print("the collection exists already")
        print(f"first run: {await ingest(client, found, 'example-folder')} stored")
        print(f"second run: {await ingest(client, found, 'example-folder')} stored")


if __name__ == "__main__":
    asyncio.run(main())
