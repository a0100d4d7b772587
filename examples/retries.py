"""Deadlines, errors, and a retry that attaches to work already done instead of doing it twice."""

from __future__ import annotations

import asyncio
import uuid

from spillway_client import (
    APITimeoutError,
    AsyncSpillway,
    DeadlineExceededError,
    NotFoundError,
    RateLimitError,
)


async def main() -> None:
    """Ask the same thing twice under one key, then meet two errors on purpose."""
    async with AsyncSpillway(max_retries=4) as client:
        # A program that died after sending finds its result again by the key it had noted.
        key = uuid.uuid4().hex
        first = await client.embeddings.create("charged once", idempotency_key=key)
        again = await client.embeddings.create("charged once", idempotency_key=key)
        print(f"same request: {first.request_id == again.request_id}")
        print(f"same vector: {first.vectors == again.vectors}")

        try:
            await client.search("no-such-collection", "anything")
        except NotFoundError as error:
            print(f"{error.status_code} {error.code}, request {error.request_id}")

        # The server is told the deadline: it refuses what it cannot finish by then, and drops what is late.
        try:
            await client.embeddings.create(["long"] * 2000, timeout_s=0.01)
        except (APITimeoutError, DeadlineExceededError, RateLimitError) as error:
            print(f"gave up in time: {type(error).__name__}")


if __name__ == "__main__":
    asyncio.run(main())
