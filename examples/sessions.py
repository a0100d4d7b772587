"""A conversation the server remembers: each turn sends only what is new, and it can be moved and deleted."""

from __future__ import annotations

import asyncio

from spillway_client import AsyncSpillway


async def main() -> None:
    """Talk in two turns, look at the session, copy it, and delete both with proof."""
    async with AsyncSpillway() as client:
        info = await client.sessions.create(ttl_s=3600, metadata={"purpose": "example"})
        session = client.session(info.id)
        print((await session.chat("What can you do?", max_tokens=40)).text)
        async with await session.stream("What do you need for that?", max_tokens=40) as stream:
            async for piece in stream.texts():
                print(piece, end="", flush=True)
            print()

        info = await session.get()
        print(f"{info.turns} turns, {info.tokens} tokens, kept {info.ttl_s} s after the last use")
        copy = await client.sessions.load(await session.export())
        for each in (info, copy):
            gone = await client.sessions.delete(each.id)
            print(
                f"deleted, with {len(gone.proof['stores'][0]['searched'])} searches that found nothing"
            )


if __name__ == "__main__":
    asyncio.run(main())
