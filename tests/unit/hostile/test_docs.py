"""docs/security.md says what is so."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_codes_of_the_table_exist() -> None:
    """Every code the section names is one the product can answer."""
    section = (
        (ROOT / "docs" / "security.md").read_text(encoding="utf-8").partition("## Hostile input")[2]
    )
    rows = [line.split("|")[3] for line in section.splitlines() if line.startswith("| ")][1:]
    named = {code for row in rows for code in re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", row)}
    source = "".join(
        path.read_text(encoding="utf-8")
        for part in ("common", "services")
        for path in (ROOT / part).rglob("*.py")
    )

    assert len(named) > 25
    assert sorted(code for code in named - {"body_timeout_s"} if f'"{code}"' not in source) == []
