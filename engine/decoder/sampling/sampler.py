"""The sampler: draws tokens from logits, for all rows of a batch at once, each row independent of the others.

The order is vLLM's: ids that a grammar forbids, bias and banned ids, penalties, temperature, then min_p, top_k and
top_p over the probabilities at that temperature. Log probabilities are those of the raw logits, before these steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.decoder.executor.interface import SampledToken, SamplingRequest, TokenFilterError
from engine.decoder.sampling.philox import uniforms

SMALL = 4096  # rows of at most this many ids are sorted as a whole
CANDIDATES = 128  # likeliest ids of a longer row that are tried before the row is sorted


class UndrawnRow(Exception):
    """The error of a row of logits whose filter allows no token; `row` is its number."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def draw_tokens(logits: Tensor, draws: Sequence[SamplingRequest]) -> list[SampledToken]:
    """Draw one token from each row of finite, contiguous fp32 logits (rows, vocabulary), which are changed.

    Temperature 0 takes the likeliest token, and the lowest id among equals. UndrawnRow if a row allows no token.
    """
    if not draws:
        return []
    told = [row for row, draw in enumerate(draws) if draw.logprobs >= 0]
    raw = torch.log_softmax(logits[told], dim=-1) if told else None
    _filter(logits, draws)
    _shift(logits, draws)
    _penalise(logits, draws)
    tokens = [0] * len(draws)
    sampled = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    greedy = [row for row, draw in enumerate(draws) if draw.sampling.temperature <= 0]
    if greedy:
        _scatter(tokens, greedy, _likeliest(_rows(logits, greedy)))
    if sampled:
        _scatter(tokens, sampled, _sample(_rows(logits, sampled), [draws[row] for row in sampled]))
    drawn = [SampledToken(token, 0.0, []) for token in tokens]
    if raw is not None:
        for row, found in zip(told, _report(raw, told, tokens, draws), strict=True):
            drawn[row] = found
    return drawn


def is_plain(draw: SamplingRequest) -> bool:
    """True if the draw is just the likeliest id that is not banned, without log probabilities."""
    how = draw.sampling
    return (
        how.temperature <= 0
        and draw.logprobs < 0
        and draw.grammar is None
        and how.repetition == 1
        and not (how.bias or how.frequency or how.presence)
    )


def _filter(logits: Tensor, draws: Sequence[SamplingRequest]) -> None:
    """Set the logits of ids that a row's grammar forbids to minus infinity."""
    for row, draw in enumerate(draws):
        if draw.grammar is None:
            continue
        try:
            allowed = draw.grammar.allowed(draw.output)
        except TokenFilterError as error:
            raise UndrawnRow(row, str(error)) from error
        if allowed is None:
            continue
        bits = np.unpackbits(np.frombuffer(allowed, dtype=np.uint8), bitorder="little")
        left = torch.from_numpy(bits[: logits.shape[1]] == 0).to(logits.device)
        logits[row].masked_fill_(left, float("-inf"))


def _shift(logits: Tensor, draws: Sequence[SamplingRequest]) -> None:
    """Add each row's bias; the logits of banned ids become minus infinity."""
    rows: list[int] = []
    ids: list[int] = []
    amounts: list[float] = []
    for row, draw in enumerate(draws):
        for token, amount in draw.sampling.bias.items():
            rows.append(row)
            ids.append(token)
            amounts.append(amount)
    if rows:
        shift = torch.tensor(amounts, device=logits.device)
        logits.index_put_(_at(rows, ids, logits), shift, accumulate=True)
    rows = [row for row, draw in enumerate(draws) for _ in draw.banned]
    ids = [token for draw in draws for token in draw.banned]
    if rows:
        minus = torch.tensor(float("-inf"), device=logits.device)
        logits.index_put_(_at(rows, ids, logits), minus)


def _penalise(logits: Tensor, draws: Sequence[SamplingRequest]) -> None:
    """Apply the repetition penalty (prompt and output), and the frequency and presence penalties (output only)."""
    repeated = [
        [*draw.prompt, *draw.output] if draw.sampling.repetition != 1 else [] for draw in draws
    ]
    if any(repeated):
        at, owners, _ = _occurring(repeated, logits)
        amount = _column([draw.sampling.repetition for draw in draws], logits)[owners, 0]
        some = logits.view(-1)[at]
        logits.view(-1)[at] = torch.where(some > 0, some / amount, some * amount)
    counted = [
        draw.output if draw.sampling.frequency or draw.sampling.presence else [] for draw in draws
    ]
    if any(counted):
        at, owners, counts = _occurring(counted, logits)
        frequency = _column([draw.sampling.frequency for draw in draws], logits)[owners, 0]
        presence = _column([draw.sampling.presence for draw in draws], logits)[owners, 0]
        logits.view(-1)[at] -= frequency * counts + presence


def _occurring(tokens: Sequence[Sequence[int]], logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each id in a row's list, its index in all logits, its row, and the number of its occurrences."""
    rows = np.repeat(np.arange(len(tokens)), [len(each) for each in tokens])
    ids = np.concatenate([np.asarray(each, dtype=np.int64) for each in tokens])
    vocabulary = logits.shape[1]
    at, counts = np.unique(rows * vocabulary + ids, return_counts=True)
    device = logits.device
    owners = torch.from_numpy(at // vocabulary).to(device)
    return torch.from_numpy(at).to(device), owners, torch.from_numpy(counts).to(device)


def _sample(logits: Tensor, draws: Sequence[SamplingRequest]) -> list[int]:
    """Draw from each row by inverting its cumulative distribution at one uniform number."""
    temperature = _column([draw.sampling.temperature for draw in draws], logits)
    logits = (logits - logits.max(dim=-1, keepdim=True).values).div_(temperature)
    chances = torch.softmax(logits, dim=-1).double()
    keys = [(draw.sampling.seed, draw.choice, draw.position, 0) for draw in draws]
    at = torch.from_numpy(uniforms(keys)).to(logits.device)[:, None]
    cut = [row for row, draw in enumerate(draws) if _cuts(draw)]
    whole = [row for row, draw in enumerate(draws) if not _cuts(draw)]
    tokens = [0] * len(draws)
    if whole:
        _scatter(tokens, whole, _invert(_rows(chances, whole), at[whole]).tolist())
    if cut:
        found = _sample_cut(_rows(chances, cut), [draws[row] for row in cut], at[cut])
        _scatter(tokens, cut, found)
    return tokens


def _cuts(draw: SamplingRequest) -> bool:
    return draw.sampling.top_p < 1 or draw.sampling.top_k > 0 or draw.sampling.min_p > 0


def _sample_cut(chances: Tensor, draws: Sequence[SamplingRequest], at: Tensor) -> list[int]:
    """Draw from the tokens that min_p, top_k and top_p leave, in falling order of probability."""
    vocabulary = chances.shape[1]
    some = vocabulary if vocabulary <= SMALL else CANDIDATES
    values, ids = chances.topk(some, dim=-1)
    left = _left(values, draws, None if some == vocabulary else chances)
    tokens: list[int] = ids.gather(1, _invert(left, at)[:, None])[:, 0].tolist()
    # If the last candidate is left, ids beyond the candidates may be left, too; if top_k exceeds the number of
    # candidates, the probability mass for top_p is unknown. Such a row is sorted.
    for row, last in enumerate((left[:, -1] > 0).tolist()):
        if some < vocabulary and (last or some < draws[row].sampling.top_k < vocabulary):
            values, ids = _sorted(chances[row])
            left_all = _left(values[None], [draws[row]], None)
            tokens[row] = int(ids[_invert(left_all, at[row : row + 1])[0]])
    return tokens


def _left(values: Tensor, draws: Sequence[SamplingRequest], chances: Tensor | None) -> Tensor:
    """Return falling probabilities, 0 where min_p, top_k or top_p cut them; the first is always kept.

    min_p and top_k cut first; top_p then keeps the fewest probabilities that reach its share of the rest. `chances` has
    all probabilities of each row if `values` has only the largest.
    """
    least = _column([draw.sampling.min_p for draw in draws], values).double() * values[:, :1]
    top_k = [draw.sampling.top_k or 1 << 40 for draw in draws]
    ranks = torch.arange(values.shape[1], device=values.device)[None, :]
    kept = (values >= least) & (ranks < torch.tensor(top_k, device=values.device)[:, None])
    left = values * kept
    mass = left.sum(dim=-1, keepdim=True)
    if chances is not None:
        for row, draw in enumerate(draws):
            if top_k[row] >= chances.shape[1] and draw.sampling.top_p < 1:
                whole = chances[row]
                mass[row] = (whole[whole >= least[row]] if draw.sampling.min_p > 0 else whole).sum()
    top_p = _column([draw.sampling.top_p for draw in draws], values).double()
    within = (left.cumsum(dim=-1) - left) < top_p * mass
    within[:, 0] = True
    return left * (within | (top_p >= 1))


def _likeliest(logits: Tensor) -> list[int]:
    """Return the index of each row's largest logit, the first among equals."""
    if logits.device.type == "cpu":  # numpy is several times faster than torch here
        best: list[int] = logits.numpy().argmax(axis=1).tolist()
        return best
    return logits.argmax(dim=-1).tolist()


def _sorted(chances: Tensor) -> tuple[Tensor, Tensor]:
    """Return one row's probabilities in falling order, and their ids."""
    if chances.device.type == "cpu":  # numpy is many times faster than torch here
        ids = torch.from_numpy(np.argsort(-chances.float().numpy()))
        return chances[ids], ids
    values, ids = chances.sort(descending=True, stable=True)
    return values, ids


def _invert(chances: Tensor, at: Tensor) -> Tensor:
    """Return the index at which each row's cumulative sum passes `at` (rows, 1) of its total."""
    mass = chances.cumsum(dim=-1)
    found = torch.searchsorted(mass, at * mass[:, -1:], right=True)[:, 0]
    for row in (found == chances.shape[1]).nonzero()[:, 0].tolist():
        found[row] = chances[row].nonzero()[-1, 0]  # rounding put the target beyond the last sum
    return found


def _report(
    raw: Tensor, told: Sequence[int], tokens: Sequence[int], draws: Sequence[SamplingRequest]
) -> list[SampledToken]:
    """Return drawn tokens with log probabilities and the number of alternatives that each row requested."""
    most = min(max(draws[row].logprobs for row in told), raw.shape[1])
    values, ids = (each.tolist() for each in raw.topk(most, dim=-1))
    picked = torch.tensor([tokens[row] for row in told], device=raw.device)[:, None]
    own = raw.gather(1, picked)[:, 0].tolist()
    return [
        SampledToken(
            tokens[row],
            own[n],
            list(zip(ids[n], values[n], strict=True))[: draws[row].logprobs],
        )
        for n, row in enumerate(told)
    ]


def _at(rows: object, ids: object, logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.as_tensor(rows, device=logits.device), torch.as_tensor(ids, device=logits.device)


def _rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows, without a copy if `chosen` are all rows."""
    return values if len(rows) == len(values) else values[rows]


def _scatter(tokens: list[int], rows: Sequence[int], found: Sequence[int]) -> None:
    for row, token in zip(rows, found, strict=True):
        tokens[row] = token


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
