"""The hazard: the rate at which sessions return, learned online from earlier returns."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

TURNS, ANSWERS, LENGTHS, IDLES = 12, 6, 10, 30
# Kinds of nodes: a session without shared pages, a session's part after its shared pages, pages before a fork.
KINDS = 3
FIRST = -10  # the second bucket of idle time begins at 2 ** FIRST seconds
# The axes of each factor: 0 kind and turn, 1 answer, 2 length, 3 idle time.
AXES = ((3,), (0,), (1,), (2,), (0, 1))
WEIGHT = 4.0  # the prior's weight in events, for each level of each factor
PRIOR = 0.5  # hazard x idle time without observations
EVERY = 64  # turns between fits
MEMORY = 2000  # turns after which an observation has 1/e of its weight
# The rates of a bucket of idle time are known once it was exposed for so long that the prior expects this many returns.
# Of unknown buckets the returns of the prior are expected, up to this idle time and in the node's own bucket.
KNOWN, UNKNOWN_S = 4.0, 32.0
NEVER = math.inf
_LOW = np.concatenate([[0.0], 2.0 ** np.arange(FIRST + 1, FIRST + IDLES)])
_HIGH = np.concatenate([_LOW[1:], [math.inf]])
_WIDTH = np.where(np.isfinite(_HIGH), _HIGH - _LOW, 0.0)
_PRIOR = PRIOR / 2.0 ** (np.arange(FIRST, FIRST + IDLES) + 0.5)


class Hazard:
    """Counts of returns and seconds of exposure by class of node and idle time, and the rates of return fitted to them.

    A rate is PRIOR / idle time x one factor per level of idle time, turn, length of the last answer, length of the
    chain, turn and answer. The factors are the most likely ones for Poisson events, each with a gamma prior of mean 1.
    Idle times and lengths are bucketed by powers of two, so nothing depends on the scale of a load.
    """

    def __init__(self) -> None:
        shape = (KINDS * TURNS, ANSWERS, LENGTHS, IDLES)
        self._events: NDArray[np.float64] = np.zeros(shape)
        self._exposed_s: NDArray[np.float64] = np.zeros(shape)
        self._factors: list[NDArray[np.float64]] = [np.ones(1)] * len(AXES)
        self._logs: NDArray[np.float64] = np.broadcast_to(np.log(_PRIOR), shape).ravel()
        self._coming: NDArray[np.float64] = self._ahead(np.broadcast_to(_PRIOR, shape))
        self._classes: NDArray[np.int64] = np.full(64, -1)  # by slot; -1: no node
        self._counted_s: NDArray[np.float64] = np.full(64, NEVER)  # end of counted exposure

    def enter(self, slot: int, kind: int, size: tuple[int, int, int], counted_s: float) -> None:
        """Record a node's kind and size: turns, pages of the last answer, pages of the chain.

        Its idle time begins at `counted_s`, which is NEVER while its session runs.
        """
        while slot >= len(self._classes):
            self._classes = np.concatenate([self._classes, np.full(len(self._classes), -1)])
            self._counted_s = np.concatenate(
                [self._counted_s, np.full(len(self._counted_s), NEVER)]
            )
        turns, answer, length = size
        turns = turns if turns < 4 else 2 + turns.bit_length()
        level = kind * TURNS + min(TURNS - 1, turns)
        level = level * ANSWERS + min(ANSWERS - 1, answer.bit_length())
        self._classes[slot] = level * LENGTHS + min(LENGTHS - 1, length.bit_length())
        self._counted_s[slot] = counted_s

    def leave(self, slot: int, since_s: float, now_s: float, *, returned: bool) -> None:
        """End the idle time of a node, idle since `since_s`; `returned`: since its session came back."""
        counted_s = float(self._counted_s[slot])
        if counted_s > now_s:
            return
        self._counted_s[slot] = NEVER
        cell = int(self._classes[slot])
        exposed = np.minimum(now_s - since_s, _HIGH) - np.maximum(counted_s - since_s, _LOW)
        self._exposed_s.reshape(-1, IDLES)[cell] += np.maximum(exposed, 0.0)
        if returned:
            power = math.floor(math.log2(max(now_s - since_s, 1e-9))) - FIRST
            self._events.reshape(-1, IDLES)[cell, min(IDLES - 1, max(0, power))] += 1

    def remove(self, slot: int) -> None:
        """Forget a node."""
        if slot < len(self._classes):
            self._classes[slot], self._counted_s[slot] = -1, NEVER

    def rates(self, since_s: NDArray[np.float64], now_s: float) -> NDArray[np.float64]:
        """Return by slot the rate, per second, of turns that reach this node but no node below it."""
        size = len(since_s)
        classes = self._classes[:size]
        at = np.log2(np.maximum(now_s - since_s, 1e-3)) - (FIRST + 0.5)
        at = np.clip(at, 0.0, IDLES - 1.001)
        low = at.astype(np.int64)
        at -= low
        low += np.maximum(classes, 0) * IDLES
        logs = self._logs[low]
        logs += at * (self._logs[low + 1] - logs)
        return np.where(classes >= 0, np.exp(logs), 0.0)

    def returns(self, since_s: NDArray[np.float64], now_s: float) -> NDArray[np.float64]:
        """Return by slot the number of turns expected from now on that reach this node but no node below it."""
        classes = self._classes[: len(since_s)]
        idle = np.log2(np.maximum(now_s - since_s, 2.0**FIRST)) - FIRST
        cells = np.maximum(classes, 0) * IDLES + np.minimum(idle.astype(np.int64), IDLES - 1)
        found: NDArray[np.float64] = np.where(classes >= 0, self._coming[cells], 0.0)
        return found

    def _ahead(self, rates: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return, by class and bucket of idle time, the returns expected from the bucket's beginning on."""
        known = self._exposed_s.sum((0, 1, 2)) * _PRIOR >= KNOWN
        expected = np.where(known, rates * _WIDTH, 0.0)
        ahead = np.flip(np.flip(expected, -1).cumsum(-1), -1)
        unknown = np.concatenate([[0.0], np.cumsum(np.where(known, 0.0, _PRIOR * _WIDTH))])
        buckets = np.arange(IDLES)
        end = np.maximum(buckets + 1, np.searchsorted(_LOW, UNKNOWN_S))
        found: NDArray[np.float64] = ahead + unknown[end] - unknown[buckets]
        return found.ravel()

    def fit(self, since_s: NDArray[np.float64], now_s: float) -> None:
        """Count the exposure of all idle nodes, and fit the factors to the observations."""
        slots = np.flatnonzero(self._counted_s[: len(since_s)] < now_s)
        begin_s = (self._counted_s[slots] - since_s[slots])[:, None]
        end_s = (now_s - since_s[slots])[:, None]
        exposed = np.maximum(np.minimum(end_s, _HIGH) - np.maximum(begin_s, _LOW), 0.0)
        np.add.at(self._exposed_s.reshape(-1, IDLES), self._classes[slots], exposed)
        self._counted_s[slots] = now_s
        self._events *= 1 - EVERY / MEMORY
        self._exposed_s *= 1 - EVERY / MEMORY
        rates = np.broadcast_to(_PRIOR, self._events.shape).copy()
        for factor in self._factors:
            rates *= factor
        expected = rates * self._exposed_s
        for number, axes in enumerate(AXES):
            others = tuple({0, 1, 2, 3} - set(axes))
            events = self._events.sum(others, keepdims=True) + WEIGHT
            before = self._factors[number]
            after = events / (expected.sum(others, keepdims=True) / before + WEIGHT)
            self._factors[number] = after
            rates *= after / before
            expected *= after / before
        self._logs = np.log(rates).ravel()
        self._coming = self._ahead(rates)
