"""Pages of the handbook as PDFs by real programs, and questions about them: what tours of an installation ask.

    python -m tests.support.handbook_pdfs write DIRECTORY
    python -m tests.support.handbook_pdfs ask URL COLLECTION

Every PDF has two pages about two things, of which the second is asked about, so that a citation names a page.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from models.demo.world import handbook
from tests.clients.environments import python

COUNT = 20
FIRST = "pudia"  # the one that the tour asks about by name
# Answers of the shipped model that must be right; it has read every page's like before, not the page. 15 are, whether
# the PDFs are by 3 programs or by 13; one may turn on how another processor rounds.
RIGHT = 14
SCRIPT = Path(__file__).with_name("pdf_programs.py")


class Asked(NamedTuple):
    """A question about a PDF's second page, and what the answer must say."""

    pdf: str
    question: str
    value: str


def texts() -> dict[str, list[str]]:
    """Return the PDFs' names and pages."""
    about = {page.name.removesuffix(".md"): _plain(page.text) for page in handbook.pages()}
    names = sorted(about, key=lambda name: name != FIRST)
    return {
        name: [about[other], about[name]] for name, other in zip(names, names[COUNT:], strict=False)
    }


def _plain(page: str) -> str:
    title, _, body = page.removeprefix("# ").partition("\n\n")
    return f"{title}. {' '.join(body.split())}"


def questions() -> list[Asked]:
    """Return a question about each PDF."""
    wanted = dict.fromkeys(list(texts())[:COUNT])
    found = {}
    for each in handbook.questions():
        name = each.page.removesuffix(".md")
        if name in wanted and name not in found:
            found[name] = Asked(f"{name}.pdf", each.text, each.value)
    return list(found.values())


def write(directory: Path) -> str:
    """Write the PDFs, with the packages' own environment if it is there; return which program wrote which."""
    interpreter = python("pdf") or Path(sys.executable)
    given = dict(list(texts().items())[:COUNT])
    done = subprocess.run(
        [str(interpreter), str(SCRIPT), str(directory)],
        input=json.dumps(given), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def ask(url: str, collection: str) -> list[str]:
    """Ask about every PDF; return what was not so: a passage or a citation of another document or page."""
    wrong, right = [], 0
    for each in questions():
        answer = _answer(url, collection, each.question)
        passages = answer["retrieval"]["passages"]
        mine = [passage for passage in passages if passage["document_id"].endswith(each.pdf)]
        pages = [_pages(passage) for passage in mine]
        if not any(first <= 2 == last for first, last in pages):
            wrong.append(
                f"{each.pdf}: {each.question} found {[p['document_id'] for p in passages]}, pages {pages}"
            )
        message = answer["choices"][0]["message"]
        if each.value in message["content"]:
            right += 1
            cited = message.get("citations", [])
            if not any(
                one["document_id"].endswith(each.pdf) and one["page"] <= 2 <= one["last_page"]
                for one in cited
            ):
                wrong.append(f"{each.pdf}: {message['content']!r} cites {cited}, not page 2")
    if right < RIGHT:
        wrong.append(f"{right} of {COUNT} answers are right; expected {RIGHT}")
    return wrong or [
        f"{right} of {COUNT} answers are right, each with a citation of the right page"
    ]


def _answer(url: str, collection: str, question: str) -> Any:
    body = {
        "messages": [{"role": "user", "content": question}],
        # By words, too: each question names its page, whose passage holds another page as well.
        "retrieval": {"collection": collection, "k": 3, "mode": "hybrid"},
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def _pages(passage: dict[str, Any]) -> tuple[int, int]:
    """Return the first and the last page of a passage."""
    first = passage.get("page", 0)
    return first, first + len(passage.get("page_starts", ()))


def main() -> int:
    """Do what the words ask for; 1 if something was not so."""
    if sys.argv[1] == "write":
        print(write(Path(sys.argv[2])), end="")
        return 0
    found = ask(sys.argv[2], sys.argv[3])
    print("\n".join(found))
    return int(len(found) > 1 or "right page" not in found[0])


if __name__ == "__main__":
    sys.exit(main())
