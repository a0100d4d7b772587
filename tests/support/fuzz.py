"""What schemathesis checks beyond the document; loaded by its command line."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.check
def no_fault(_ctx: Any, response: Any, case: Any) -> None:
    """No answer is a fault of the server: above 499 is only 503, "not able now", and 504 where a deadline was set."""
    own_deadline = any(name.lower() == "spillway-timeout" for name in case.headers or {})
    allowed = {503, 504} if own_deadline else {503}
    assert response.status_code < 500 or response.status_code in allowed, response.text
