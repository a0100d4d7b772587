"""Environments of other packages under .clients-env/<name>, pinned: `python -m tests.clients.environments` makes them.

Two of clients, since half of the packages want openai 2 and the other half go with 3; and one of programs that write
PDFs, which nothing but a tour needs: `python -m tests.clients.environments pdf`.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

PLACE = Path(__file__).resolve().parents[2] / ".clients-env"
HOW = "python -m tests.clients.environments"
INSTALL_S = 1800
ENVIRONMENTS = {
    "openai2": (
        "openai==2.54.0",
        "langchain-openai==1.7.4",
        "llama-index-core==0.14.25",
        "llama-index-llms-openai-like==0.8.1",
        "llama-index-embeddings-openai-like==0.4.0",
        "litellm==1.106.12",
        "mcp==2.3.0",
        "cohere==7.3.1",
        "instructor==1.17.0",
        "pydantic-ai-slim[openai]==2.31.1",
        "huggingface-hub==1.33.0",
        "haystack-ai==3.4.1",
    ),
    "openai3": (
        "openai==3.57.0",
        "pydantic-ai-slim[openai]==2.68.0",
        "huggingface-hub==2.4.0",
        "haystack-ai==3.4.1",
    ),
}
PROGRAMS = {
    "pdf": (
        "reportlab==5.1.0",
        "fpdf2==2.8.9",
        "cairocffi==1.7.1",
        "weasyprint==70.0",
        "xhtml2pdf==0.2.28",
        "typst==0.15.0",
        "borb==3.0.9",
        "pymupdf==2.0",
        "matplotlib==3.11.2",
        "pypdf==7.1.0",
        "pikepdf==10.17.0",
    )
}
_ALL = ENVIRONMENTS | PROGRAMS


def python(name: str) -> Path | None:
    """Return the interpreter of an environment that is complete, else None."""
    done = PLACE / name / ".complete"
    wanted = "\n".join(_ALL[name])
    there = done.exists() and done.read_text(encoding="utf-8") == wanted
    return PLACE / name / "bin" / "python" if there else None


def make(name: str) -> None:
    """Install an environment; CalledProcessError if pip cannot."""
    target = PLACE / name
    venv.create(target, with_pip=True)
    words = [str(target / "bin" / "python"), "-m", "pip", "install", "-q", *_ALL[name]]
    subprocess.run(words, check=True, timeout=INSTALL_S)
    (target / ".complete").write_text("\n".join(_ALL[name]), encoding="utf-8")


def main() -> None:
    """Make every environment of clients that is not there, or those named."""
    for name in sys.argv[1:] or ENVIRONMENTS:
        if python(name) is None:
            print(f"{name}: installing into {PLACE / name}")
            make(name)
        print(f"{name}: ready")


if __name__ == "__main__":
    main()
