"""Draw tokens from logits, for all rows of a batch at once, each row independent of the others.

The order is that of vLLM: bias and banned ids, penalties, temperature, then min_p, top_k and top_p over the
probabilities at that temperature. Log probabilities are those of the raw logits, before any of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.compute.philox import uniforms
from services.gpu_worker.decide.batch import Draw, Drawn

CANDIDATES = 1024  # so many of the likeliest are looked at before everything is sorted


def draw_tokens(logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """Draw one token from each row of finite fp32 logits (rows, vocabulary), which are changed.

    Temperature 0 takes the likeliest token, the lowest id among equals.
    """
    if not draws:
        return []
    told = [row for row, draw in enumerate(draws) if draw.logprobs >= 0]
    raw = torch.log_softmax(logits[told], dim=-1) if told else None
    _shift(logits, draws)
    _penalise(logits, draws)
    tokens = _greedy(logits)
    sampled = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if sampled:
        chosen = _sample(logits[sampled], [draws[row] for row in sampled])
        for row, token in zip(sampled, chosen, strict=True):
            tokens[row] = token
    drawn = [Drawn(token, 0.0, []) for token in tokens]
    if raw is not None:
        for row, found in zip(told, _report(raw, told, tokens, draws), strict=True):
            drawn[row] = found
    return drawn


def _shift(logits: Tensor, draws: Sequence[Draw]) -> None:
    """Add each row's bias; what is banned becomes minus infinity."""
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


def _penalise(logits: Tensor, draws: Sequence[Draw]) -> None:
    """Apply repetition (prompt and output), frequency and presence (output only)."""
    repeated = [row for row, draw in enumerate(draws) if draw.sampling.repetition != 1]
    if repeated:
        seen = _counts(logits, [[*draws[row].prompt, *draws[row].output] for row in repeated]) > 0
        amount = _column([draws[row].sampling.repetition for row in repeated], logits)
        some = logits[repeated]
        scaled = torch.where(some > 0, some / amount, some * amount)
        logits[repeated] = torch.where(seen, scaled, some)
    counted = [
        row
        for row, draw in enumerate(draws)
        if draw.output and (draw.sampling.frequency or draw.sampling.presence)
    ]
    if counted:
        counts = _counts(logits, [draws[row].output for row in counted])
        frequency = _column([draws[row].sampling.frequency for row in counted], logits)
        presence = _column([draws[row].sampling.presence for row in counted], logits)
        logits[counted] -= frequency * counts + presence * (counts > 0)


def _counts(logits: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Return how often each id occurs in each list, fp32 (lists, vocabulary)."""
    counts = torch.zeros(len(tokens), logits.shape[1], device=logits.device)
    rows = np.repeat(np.arange(len(tokens)), [len(each) for each in tokens])
    ids = np.concatenate([np.asarray(each, dtype=np.int64) for each in tokens])
    one = torch.ones(len(ids), device=logits.device)
    return counts.index_put_(_at(rows, ids, logits), one, accumulate=True)


def _greedy(logits: Tensor) -> list[int]:
    """Return each row's likeliest id, the lowest among equals."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    return tokens


def _sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw from each row by inverting its cumulative distribution at one uniform number."""
    temperature = _column([draw.sampling.temperature for draw in draws], logits)
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
    chances = torch.softmax(logits, dim=-1).double()
    keys = [(draw.sampling.seed, draw.choice, draw.position, 0) for draw in draws]
    at = torch.from_numpy(uniforms(keys)).to(logits.device)[:, None]
    cut = [row for row, draw in enumerate(draws) if _cuts(draw)]
    whole = [row for row, draw in enumerate(draws) if not _cuts(draw)]
    tokens = [0] * len(draws)
    if whole:
        for row, token in zip(whole, _invert(chances[whole], at[whole]).tolist(), strict=True):
            tokens[row] = token
    if cut:
        found = _sample_cut(chances[cut], [draws[row] for row in cut], at[cut])
        for row, token in zip(cut, found, strict=True):
            tokens[row] = token
    return tokens


def _cuts(draw: Draw) -> bool:
    return draw.sampling.top_p < 1 or draw.sampling.top_k > 0 or draw.sampling.min_p > 0


def _sample_cut(chances: Tensor, draws: Sequence[Draw], at: Tensor) -> list[int]:
    """Draw from the likeliest tokens that min_p, top_k and top_p leave, in falling order of chance."""
    vocabulary = chances.shape[1]
    some = min(CANDIDATES, vocabulary)
    values, ids = chances.topk(some, dim=-1)
    least = _column([draw.sampling.min_p for draw in draws], chances).double() * values[:, :1]
    top_k = [draw.sampling.top_k or vocabulary for draw in draws]
    top_p = _column([draw.sampling.top_p for draw in draws], chances).double()
    kept = (values >= least) & _first(top_k, values)
    mass = (values * kept).sum(dim=-1, keepdim=True)
    everything = torch.tensor([k >= vocabulary for k in top_k], device=chances.device)[:, None]
    mass = torch.where(everything, (chances * (chances >= least)).sum(dim=-1, keepdim=True), mass)
    kept &= _within(values, kept, top_p * mass)
    tokens: list[int] = ids.gather(1, _invert(values * kept, at)[:, None])[:, 0].tolist()
    # where the last candidate stays, more might, and where top_k reaches further, their mass is not known
    for row, last in enumerate(kept[:, -1].tolist()):
        if some < vocabulary and (last or some < top_k[row] < vocabulary):
            values, ids = chances[row : row + 1].sort(dim=-1, descending=True, stable=True)
            kept_all = (values >= least[row]) & _first([top_k[row]], values)
            mass_all = (values * kept_all).sum(dim=-1, keepdim=True)
            kept_all &= _within(values, kept_all, top_p[row] * mass_all)
            tokens[row] = int(ids[0, _invert(values * kept_all, at[row : row + 1])[0]])
    return tokens


def _first(top_k: Sequence[int], values: Tensor) -> Tensor:
    ranks = torch.arange(values.shape[1], device=values.device)[None, :]
    return ranks < torch.tensor(top_k, device=values.device)[:, None]


def _within(values: Tensor, kept: Tensor, mass: Tensor) -> Tensor:
    """Return the fewest of the kept chances, from the first on, that reach `mass` (rows, 1); one at least."""
    left = values * kept
    within = (left.cumsum(dim=-1) - left) < mass
    within[:, 0] = True
    return within


def _invert(chances: Tensor, at: Tensor) -> Tensor:
    """Return the index at which each row's cumulative sum passes `at` (rows, 1) of its total."""
    mass = chances.cumsum(dim=-1)
    found = torch.searchsorted(mass, at * mass[:, -1:], right=True)
    # rounding may put the target at the very end: take the last index that has any chance
    last = chances.shape[1] - 1 - (chances > 0).int().flip(-1).argmax(dim=-1, keepdim=True)
    return torch.minimum(found, last)[:, 0]


def _report(
    raw: Tensor, told: Sequence[int], tokens: Sequence[int], draws: Sequence[Draw]
) -> list[Drawn]:
    """Return drawn tokens with their log probabilities and as many alternatives as each row asked for."""
    most = min(max(draws[row].logprobs for row in told), raw.shape[1])
    values, ids = (each.tolist() for each in raw.topk(most, dim=-1))
    picked = torch.tensor([tokens[row] for row in told], device=raw.device)[:, None]
    own = raw.gather(1, picked)[:, 0].tolist()
    return [
        Drawn(
            tokens[row],
            own[n],
            list(zip(ids[n], values[n], strict=True))[: draws[row].logprobs],
        )
        for n, row in enumerate(told)
    ]


def _at(rows: object, ids: object, logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.as_tensor(rows, device=logits.device), torch.as_tensor(ids, device=logits.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
