"""What schemathesis checks beyond the document; loaded by its command line."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.check
def no_fault(_ctx: Any, response: Any, _case: Any) -> None:
    """No answer is a fault of the server: 503, "not able now", is the only status above 499."""
    assert response.status_code < 500 or response.status_code == 503, response.text
