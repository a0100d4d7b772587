"""Store a few notes and search them by meaning, restricted by metadata."""

from __future__ import annotations

import asyncio

from spillway_client import AsyncSpillway, ConflictError

NOTES = [
    ("paris", "The Eiffel Tower was finished in 1889.", {"year": 1889, "kind": "building"}),
    ("london", "Big Ben's clock started ticking in 1859.", {"year": 1859, "kind": "clock"}),
    (
        "prague",
        "The astronomical clock of Prague dates from 1410.",
        {"year": 1410, "kind": "clock"},
    ),
]


async def main() -> None:
    """Create, add, search."""
    async with AsyncSpillway() as client:
        try:
            await client.collections.create("example-notes")
        except ConflictError:
            print("the collection exists already")
        written = await client.documents("example-notes").add(
            {"id": id_, "text": text, "metadata": metadata} for id_, text, metadata in NOTES
        )
        found = await client.search(
            "example-notes",
            "an old timepiece",
            k=2,
            filter={"$and": [{"kind": "clock"}, {"year": {"$lt": 1800}}]},
            after=written.applied,  # see the write just made, whichever replica answers
        )
        for hit in found.data:
            print(f"{hit.score:.2f}  {hit.id}  {hit.text}")


if __name__ == "__main__":
    asyncio.run(main())
