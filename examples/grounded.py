"""An answer from one's own documents, with the passages it cites."""

from __future__ import annotations

import asyncio

from spillway_client import AsyncSpillway, ConflictError

COLLECTION = "example-harbour"
PAGES = {
    "brisholm": "# Brisholm\n\nBrisholm is a quiet town by the sea. The town was founded in 1871.",
    "verrin": "# Verrin\n\nThe Verrin is a wooden ship. Its captain is Tomas Kelder.",
}
QUESTIONS = (
    "When was Brisholm founded?",
    "Who is the captain of the Verrin?",
    "Who is the mayor of Dorwick?",
)


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
        for question in QUESTIONS:
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
