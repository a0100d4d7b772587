"""What a model predicts of a text behind a prompt, its passages computed in the prompt, or each alone beforehand.

Computed alone, a passage's keys and values know nothing of what stands before it in the prompt: the approximation of
`retrieval.precomputed`, made by the product's own code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.workloads.slot_prompts import SlotPrompt
from common.errors import ConfigError
from common.pages.identity import PAGE
from engine.decoder.executor.interface import PassagePlace, SequenceInput
from engine.decoder.executor.torch_executor import TorchExecutor


class SlotReader:
    """Reads prompts with one executor, whose pages it takes for itself; nothing else may compute meanwhile."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor

    def predicted(self, prompt: Sequence[int], text: Sequence[int], since: int) -> Tensor:
        """Return log probabilities (tokens, vocabulary) of the tokens of `text` from `since` on, all else computed."""
        tokens = [*prompt, *text[:-1]]
        return self._read(tokens, list(range(len(tokens))), [], len(text) - since)

    def approximated(self, prompt: SlotPrompt, text: Sequence[int], since: int) -> Tensor:
        """Return the same with each passage computed behind the prompt's first token alone, and put into its place.

        ConfigError for a model whose keys cannot be turned to another position.
        """
        if not self._executor.precomputes:
            raise ConfigError(
                f"model {self._executor.name}: its passages cannot be computed beforehand; expected a model whose "
                "layers all see the whole text and turn their keys by the position (RoPE)"
            )
        tokens = [*prompt.tokens, *text[:-1]]
        places = [
            PassagePlace(b"", [tokens[0], *tokens[begin:end]], begin, begin, end)
            for begin, end in prompt.spans
            if begin < end
        ]
        placed = {at for begin, end in prompt.spans for at in range(begin, end)}
        positions = [at for at in range(len(tokens)) if at not in placed]
        return self._read(tokens, positions, places, len(text) - since)

    def _read(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        places: Sequence[PassagePlace],
        rows: int,
    ) -> Tensor:
        """Compute the rows at `positions` and return the log probabilities after the last `rows` of them."""
        pages = [list(range(-(-len(tokens) // PAGE)))] * len(self._executor.shape.windows)
        asked = SequenceInput([tokens[at] for at in positions], positions, pages, places=places)
        executor = self._executor
        if places:
            executor._place([asked])
        with torch.inference_mode():
            hidden = executor._compute([asked])
            return torch.log_softmax(executor._decoder.logits(hidden[-rows:]), -1)
