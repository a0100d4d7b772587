"""Model cards: the facts about a model on which router and workers must agree."""

from __future__ import annotations

from typing import Literal

from common.types.generation import SamplingParams
from common.wire.message import Message


class ModelCard(Message, frozen=True):
    """The facts about a model on which router and workers must agree; `Models.publish` stores also the tokenizer.

    `vocabulary` is the number of token ids that the model knows, 0 for its tokenizer's number. An encoder's text
    follows the one of `prompts` that the request names, else `default_prompt`. A generator's `max_tokens` is its
    context; `sampling` holds its default parameters; `stop_ids` end its turns; `grounding_template` renders passages
    and question into one user message (empty: the router's own template); `reads` is the least average number of
    characters per token of passages that the model can read (0: any text); `grammars` is True if its workers can bind
    an answer to a grammar; `precomputes` is True if its workers can compute passages alone and put them into prompts.
    """

    name: str
    kind: Literal["embed", "rerank", "generate"]
    family: str
    fingerprint: str
    dimension: int
    max_tokens: int
    vocabulary: int = 0
    partitions: int = 1
    pair_separator: bool = False
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    query_prompt: str = ""
    document_prompt: str = ""
    created_ms: int = 0
    chat_template: str = ""
    grounding_template: str = ""
    reads: float = 0.0
    bos: str = ""
    eos: str = ""
    stop_ids: list[int] = []
    sampling: SamplingParams = SamplingParams()
    grammars: bool = False
    precomputes: bool = False
