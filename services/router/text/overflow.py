"""The error for a text that a model's context cannot hold, worded as clients expect it.

OpenAI's and vLLM's servers begin their message with the same words; libraries look for these, or for the code in the
text.
"""

from __future__ import annotations

from common.errors import InvalidRequest

CHARACTERS_PER_TOKEN = 64  # a text with more characters per allowed token is refused untokenized


def overflow(most: int, found: str, remedy: str, param: str) -> InvalidRequest:
    """Return the error of a context of `most` tokens; `found` follows "However,", `remedy` follows "Please"."""
    return InvalidRequest(
        f"This model's maximum context length is {most} tokens. However, {found}. Please {remedy} "
        "(context_length_exceeded).",
        code="context_length_exceeded",
        param=param,
    )
