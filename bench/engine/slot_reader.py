"""What a model predicts of a text behind a prompt, its passages computed in the prompt, or each alone beforehand.

Computed alone, a passage's keys and values know nothing of what stands before it in the prompt: an approximation, which
the product does not make. Its keys are turned from the position that they were computed at to the one in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.workloads.slot_prompts import SlotPrompt
from common.errors import ConfigError
from common.pages.identity import PAGE
from engine.decoder.executor.interface import SequenceInput
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.kernels.page_memory import PageMemory, read_layer, unpack
from engine.models.decoders.cuda_graphs import GraphedDecoder
from engine.models.decoders.rope import RopeSpec
from engine.models.decoders.rotary import angles, frequencies, rotate

_CPU = torch.device("cpu")


class SlotReader:
    """Reads prompts with one executor, whose pages it takes for itself; nothing else may compute meanwhile."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor
        self._pools = executor._pools
        decoder = executor._decoder
        self._spec = (decoder.plain if isinstance(decoder, GraphedDecoder) else decoder).spec

    def predicted(self, prompt: Sequence[int], text: Sequence[int], since: int) -> Tensor:
        """Return log probabilities (tokens, vocabulary) of the tokens of `text` from `since` on, all else computed."""
        tokens = [*prompt, *text[:-1]]
        return self._read(tokens, list(range(len(tokens))), len(text) - since)

    def approximated(self, prompt: SlotPrompt, text: Sequence[int], since: int) -> Tensor:
        """Return the same with each passage computed behind the prompt's first token alone, and put into its place.

        ConfigError for a model whose keys cannot be turned to another position.
        """
        tokens = [*prompt.tokens, *text[:-1]]
        for begin, end in prompt.spans:
            if begin < end:
                self._place(prompt.tokens, begin, end, len(tokens))
        placed = {at for begin, end in prompt.spans for at in range(begin, end)}
        positions = [at for at in range(len(tokens)) if at not in placed]
        return self._read(tokens, positions, len(text) - since)

    def _read(self, tokens: Sequence[int], positions: Sequence[int], rows: int) -> Tensor:
        """Compute the rows at `positions` and return the log probabilities after the last `rows` of them."""
        pages = [list(range(-(-len(tokens) // PAGE)))] * len(self._pools)
        asked = SequenceInput([tokens[at] for at in positions], positions, pages)
        with torch.inference_mode():
            hidden = self._executor._compute([asked])
            return torch.log_softmax(self._executor._decoder.logits(hidden[-rows:]), -1)

    def _place(self, tokens: Sequence[int], begin: int, end: int, length: int) -> None:
        """Compute a passage alone, in pages behind those of the prompt, and copy its keys and values to its place."""
        if any(rope is None for rope in self._spec.ropes) or any(self._spec.windows):
            raise ConfigError(
                f"model {self._executor.name}: its passages cannot be computed beforehand; expected a model whose "
                "layers all see the whole text and turn their keys by the position (RoPE)"
            )
        alone = [tokens[0], *tokens[begin:end]]
        first = -(-length // PAGE)
        pages = list(range(first, first - (-len(alone) // PAGE)))
        asked = SequenceInput(alone, list(range(len(alone))), [pages] * len(self._pools))
        with torch.inference_mode():
            self._executor._compute([asked])
            for pool in self._pools:
                _move(pool, self._spec.ropes, pages, len(alone) - 1, begin)


def _move(
    pool: PageMemory, ropes: Sequence[RopeSpec | None], pages: Sequence[int], count: int, to: int
) -> None:
    """Copy `count` tokens of `pages`, from the second one on, to the positions from `to` on.

    There logical page l is page l.
    """
    at = torch.arange(to, to + count)
    slots = pool.slots(at // PAGE, at % PAGE)
    for layer, number in enumerate(pool.layers):
        found = unpack(read_layer(pool, pages, layer, _CPU))  # (pages, 2, kv heads, PAGE, dim)
        keys, values = (
            half.transpose(1, 2).flatten(0, 1)[1 : 1 + count] for half in found.unbind(1)
        )
        rope = ropes[number]
        assert rope is not None
        inverse = frequencies(rope, keys.shape[-1])
        turned = rotate(keys.float(), angles(torch.tensor([to - 1]), inverse, 1.0, torch.float32))
        pool.write(layer, slots, turned.to(keys.dtype).contiguous(), values.contiguous())
