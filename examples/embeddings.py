"""Embed three sentences and print how near they are to the first."""

from __future__ import annotations

import asyncio
import math

from spillway_client import AsyncSpillway


def cosine(a: list[float], b: list[float]) -> float:
    """Return the cosine of the angle between two vectors."""
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


async def main() -> None:
    """Embed and compare."""
    texts = ["a cat sat on a mat", "a kitten lay on a rug", "bond markets fell sharply"]
    async with AsyncSpillway() as client:
        result = await client.embeddings.create(texts)
    first = result.vectors[0]
    for text, vector in zip(texts, result.vectors, strict=True):
        print(f"{cosine(first, vector):.2f}  {text}")
    print(f"{result.model}: {len(first)} dimensions, {result.usage.total_tokens} tokens")


if __name__ == "__main__":
    asyncio.run(main())
