"""Model cards: what router and workers must agree on about a model."""

from __future__ import annotations

from typing import Literal

from common.types.generation import SamplingParams
from common.wire.message import Message


class ModelCard(Message, frozen=True):
    """Facts about a model on which router and worker must agree; `Models.publish` stores the tokenizer beside it.

    `vocabulary` is how many token ids the model knows, 0 if as many as its tokenizer. Of an encoder's `prompts` the one
    that a request names stands before each text, else `default_prompt`. A generator's `max_tokens` is its context;
    `sampling` is what it uses where a client says nothing; `stop_ids` end its turns; `grounding_template` renders
    passages and question into one user message (empty: the router's own); `reads` is the fewest characters that a token
    of its passages stands for, on average, where it can read them (0: any text); `grammars` says that its workers can
    bind an answer to a grammar.
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
