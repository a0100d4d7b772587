"""An answer from one's own documents, with the passages it cites."""

from __future__ import annotations

import asyncio

from spillway_client import AsyncSpillway, ConflictError

COLLECTION = "example-harbour"
PAGES = {
    "ferry": "The ferry to Brisholm leaves from pier 3. Its captain is Odile Marsten.",
    "lighthouse": "The lighthouse of Brisholm was built by Tomas Verrin in 1871.",
}


async def main() -> None:
    """Store two pages, ask what they say, and something they do not."""
    async with AsyncSpillway() as client:
        try:
            await client.collections.create(COLLECTION)
        except ConflictError:
            print("the collection exists already")
        await client.documents(COLLECTION).add(
            {"id": id_, "text": text} for id_, text in PAGES.items()
        )
        for question in ("Who built the lighthouse of Brisholm?", "Who built the ferry?"):
            answer = await client.chat.completions.create(
                question,
                retrieval={"collection": COLLECTION, "k": 2, "include_passages": True},
                temperature=0,
            )
            print(f"{question}\n  {answer.text}")
            read = {passage.index: passage for passage in answer.passages}
            for citation in answer.citations:
                print(f"    [{citation.index}] {citation.document_id}: {read[citation.index].text}")


if __name__ == "__main__":
    asyncio.run(main())
