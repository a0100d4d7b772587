"""Prompts with passages before or after the question, as the router makes them, and where each passage lies in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from tokenizers import Tokenizer

from engine.decoder.executor.torch_executor import TorchExecutor
from services.router.text.chats import template_of
from services.router.text.passages import Passage, render
from services.router.text.tokens import Spec, load

Place = Literal["before", "after"]
# The words of the shipped model's own template in the other order: as it is served it knows no place but its own.
_QUESTION_FIRST = (
    "Question: {{ question }}\n\n"
    "{% for passage in passages %}{{ '[' ~ passage.index ~ '] ' ~ passage.text ~ '\\n' }}"
    "{% else %}{{ 'No passages.\\n' }}{% endfor %}"
)


class SlotPrompt(NamedTuple):
    """A prompt up to the answer; `spans` are the tokens of each passage, from and to, those at its edges included."""

    tokens: list[int]
    spans: list[tuple[int, int]]


class SlotPrompts:
    """Makes the prompts of one model by its own templates, the router's where it has none."""

    def __init__(self, executor: TorchExecutor, folder: Path) -> None:
        """The model's tokenizer is written into `folder`, from where the router's code reads it."""
        path = folder / f"{executor.name}.tokenizer.json"
        path.write_bytes(executor.tokenizer_json())
        card = executor.card(created_ms=0, partitions=1)
        self._spec = Spec(**msgspec.structs.asdict(card), path=str(path))
        self._template = template_of(self._spec)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, without truncation and padding."""
        return load(self._spec.path).tokenizer

    def made(self, question: str, passages: Sequence[str], place: Place) -> SlotPrompt:
        """Return the prompt of a question with passages, best first, at a place."""
        texts = [" ".join(text.split()) for text in passages]
        rows = [Passage(n, "", 0, 0, 0, 0.0, text) for n, text in enumerate(texts, 1)]
        own = self._spec.grounding_template
        template = _QUESTION_FIRST if own and place == "after" else own
        content = render(template, rows, question, place)
        text = self._template.render([{"role": "user", "content": content}])
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        spans, end = list[tuple[int, int]](), 0
        for each in texts:
            begin = text.index(each, end)
            end = begin + len(each)
            within = [at for at, (a, b) in enumerate(encoded.offsets) if a < end and begin < b]
            spans.append((within[0], within[-1] + 1) if within else (0, 0))
        return SlotPrompt(encoded.ids, spans)
