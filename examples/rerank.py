"""Order documents by their relevance to a question."""

from __future__ import annotations

import asyncio

from spillway_client import AsyncSpillway

DOCUMENTS = [
    "Berlin is the capital of Germany.",
    "A capital letter begins a sentence.",
    "Paris is the capital of France.",
]


async def main() -> None:
    """Rerank and print, best first."""
    async with AsyncSpillway() as client:
        ranking = await client.rerank("What is the capital of France?", DOCUMENTS, top_n=2)
    for result in ranking.results:
        print(f"{result.relevance_score:.2f}  {DOCUMENTS[result.index]}")


if __name__ == "__main__":
    asyncio.run(main())
