"""The executor of the sim device: a linear time model, and answers that are obviously simulated. No torch.

A step takes `beta` + `alpha` * rows seconds. An answer repeats the word "simulated" and a number computed from the
prompt, one byte a token, until `max_new`: so the same prompt always has the same answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.clock import SYSTEM as CLOCK
from common.clock import SystemClock
from common.types.generation import SamplingParams
from common.types.model_card import ModelCard
from engine.decoder.executor.interface import (
    EarlyEnd,
    ModelShape,
    PageCopier,
    PageLoads,
    PassageCounts,
    SampledToken,
    SamplingRequest,
    SequenceInput,
    draw_several,
)
from engine.decoder.output.detokenizer import BYTE_OF

NAME = "sim-chat"
END, SYSTEM, USER, ASSISTANT = 256, 257, 258, 259
_SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
_CONTEXT = 8192
_PAGES = 65536
_PAGE_BYTES = 4096
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class SimulatedExecutor:
    """An executor without a model: takes the seconds of its time model; one byte is one token."""

    def __init__(
        self,
        *,
        alpha_s: float,
        beta_s: float,
        kv_bytes: int = 0,
        clock: SystemClock = CLOCK,
    ) -> None:
        self.name = NAME
        self.fingerprint = hashlib.blake2b(NAME.encode(), digest_size=16).hexdigest()
        self.device, self.dtype = "sim", "fp32"
        pages = max(1, kv_bytes // _PAGE_BYTES) if kv_bytes else _PAGES
        self.shape = ModelShape([None], [_PAGE_BYTES], pages, _CONTEXT, END + len(_SPECIAL))
        self.stop_ids = [END]
        self.copier: PageCopier | None = None
        self.exact = False  # guesses of the repeated words would beat the time model
        self.grammars = False
        # Nothing is computed here, so passages need no places; none are kept.
        self.precomputes = True
        self.passages: PassageCounts | None = None
        self.alpha_s, self.beta_s = alpha_s, beta_s
        self._clock = clock
        self._phrases: dict[bytes, bytes] = {}

    def execute(
        self,
        batch: Sequence[SequenceInput],
        loading: PageLoads | None = None,  # noqa: ARG002 - there are no tiers
        early: EarlyEnd | None = None,
    ) -> list[SampledToken | None]:
        """Return the next bytes of each answer after the seconds of the time model."""
        return draw_several(batch, self._compute, early)

    def _compute(self, batch: Sequence[SequenceInput]) -> list[SampledToken | None]:
        due = self._clock.monotonic() + self.beta_s
        due += self.alpha_s * sum(len(rows.tokens) for rows in batch)
        drawn = [None if rows.sample is None else self._draw(rows.sample) for rows in batch]
        while (left := due - self._clock.monotonic()) > 0:
            self._clock.sleep(left)
        return drawn

    def _draw(self, draw: SamplingRequest) -> SampledToken:
        phrase = answer(draw.prompt, draw.choice)
        token = phrase[len(draw.output) % len(phrase)]
        top = [(token, 0.0)] if draw.logprobs > 0 else []
        return SampledToken(token, 0.0, top)

    def card(self, *, created_ms: int, partitions: int) -> ModelCard:
        """Return the card of the model named "sim-chat"."""
        return ModelCard(
            name=self.name,
            kind="generate",
            family=f"chat.{self.name}",
            fingerprint=self.fingerprint,
            dimension=0,
            max_tokens=_CONTEXT,
            partitions=partitions,
            created_ms=created_ms,
            chat_template=_TEMPLATE,
            eos=_SPECIAL[0],
            stop_ids=self.stop_ids,
            sampling=SamplingParams(),
            precomputes=True,
        )

    def tokenizer_json(self) -> bytes:
        """Return a tokenizer whose ids 0 to 255 are bytes, followed by the special tokens."""
        tokenizer = Tokenizer(models.BPE(BYTE_OF, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
        return str(tokenizer.to_str()).encode()


def answer(prompt: Sequence[int], choice: int) -> bytes:
    """Return the phrase that the sim device repeats as its answer to a prompt."""
    digest = hashlib.blake2b(repr((list(prompt), choice)).encode(), digest_size=4).hexdigest()
    return f"simulated {digest} ".encode()
