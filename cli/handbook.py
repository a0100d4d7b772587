"""The sample collection `handbook`: Markdown pages of the world about which the shipped chat model answers.

The pages are written to the data directory, so that a user can read the pages that an answer cites.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from cli.files import Item, Root

COLLECTION = "handbook"
SOURCE = "spillway-handbook"
_PROJECT = Path(__file__).resolve().parent.parent
_GENERATOR = "models.demo.world.handbook"


def directory(data_dir: Path) -> Path:
    """Return the directory of an instance's pages."""
    return data_dir / "samples" / COLLECTION


def documents(folder: Path) -> list[Item]:
    """Write the pages into `folder` and return them as documents; none if the chat model's files are missing.

    A page is the same at every start, so it is embedded only once; an edited page is restored.
    """
    if not _at_hand():
        return []
    generator = importlib.import_module(_GENERATOR)
    generator.write_handbook(folder)
    names = {page.name for page in generator.pages()}
    found = Root(folder, SOURCE, globs=("*.md",)).documents()
    return [item for item in found if isinstance(item, Item) and item.id in names]


def _at_hand() -> bool:
    """Return whether the pages' generator can be imported: it is in the project, beside the model."""
    if (_PROJECT / "models" / "demo").is_dir() and str(_PROJECT) not in sys.path:
        sys.path.append(str(_PROJECT))
    try:
        return importlib.util.find_spec(_GENERATOR) is not None
    except ModuleNotFoundError:
        return False
