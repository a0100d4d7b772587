"""A job and its log, without a bus: wherever the log is cut, a restored job goes on to the same text and end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InternalError
from common.wire.jobs import GenerateWork
from common.wire.message import encode
from common.wire.results import Event, decode_delta
from common.worker.leases import Lease
from engine.decoder.executor.interface import SampledToken
from engine.decoder.output.detokenizer import Vocabulary
from services.adapters.generate.job import GenerationJob, build
from tests.support import small_tokenizers
from tests.support.engine import pieces_of, text_of, tokens_of

VOCABULARIES = [
    Vocabulary(small_tokenizers.byte_level()),
    Vocabulary(small_tokenizers.sentence_piece()),
]


def lease(work: GenerateWork) -> Lease:
    """Return a lease as if read from a lane."""
    return Lease("chat.m~0~x", encode(work), 1, 1, 2**53, "r", 1, False, "gpu", "1-0", 1, "w")


class Life:
    """One job driven by a list of draws per choice; it may be lost and built again from its log at any time."""

    def __init__(self, work: GenerateWork, vocabulary: Vocabulary, draws: list[list[int]]) -> None:
        self.work, self.vocabulary, self.draws = work, vocabulary, draws
        self.log: list[Event] = []
        self.job = self.begin()

    def begin(self) -> GenerationJob:
        """Build the job from the log."""
        self.job = build(
            lease(self.work), self.work, self.log, self.vocabulary, order=0, incarnation=0
        )
        return self.job

    def step(self) -> None:
        """Draw one token for every choice that goes on."""
        for choice in self.job.choices:
            if choice.finish is None:
                token = self.draws[choice.number][len(choice.tokens)]
                if (kept := choice.push(SampledToken(token, -1.0, []))) is not None:
                    choice.sequence.todo = []
                    choice.sequence.append(kept)

    def emit(self) -> None:
        """Log what is new."""
        if (found := self.job.event()) is not None:
            event, fold = found
            assert self.job.event() == found  # the same until it is acknowledged
            self.log = [event] if fold else [*self.log, event]
            self.job.acknowledged()

    def run(self, rng: random.Random, lose: float) -> Life:
        """Go on to the end, emitting now and then and losing the worker now and then."""
        while not self.job.over:
            self.step()
            if rng.random() < 0.5:
                self.emit()
            if rng.random() < lose:
                self.begin()
        self.emit()
        return self


@given(
    st.integers(0, 2**32),
    st.sampled_from(VOCABULARIES),
    st.lists(st.text("ab .é", min_size=1, max_size=3), max_size=2),
    st.integers(0, 8),
    st.integers(1, 40),
)
def test_restored_jobs_go_on(
    seed: int, vocabulary: Vocabulary, stop: list[str], min_new: int, max_new: int
) -> None:
    """A job lost any number of times delivers what an undisturbed one does: tokens, text, end, and no piece changes."""
    rng = random.Random(seed)
    low, high = (32, 130) if vocabulary is VOCABULARIES[0] else (80, 266)
    draws = [[rng.randint(low, high) for _ in range(max_new)] for _ in range(2)]
    work = GenerateWork(
        fingerprint="f",
        scope="t",
        prompts=[[1, 2]],
        n=2,
        max_new=max_new,
        min_new=min_new,
        stop=stop,
        stop_ids=[rng.randint(low, high) for _ in range(3)],
    )
    calm = Life(work, vocabulary, draws).run(random.Random(seed), 0.0)
    rough = Life(work, vocabulary, draws).run(random.Random(seed + 1), 0.3)

    for choice in (0, 1):
        pieces = [pieces_of(life.log) for life in (calm, rough)]
        assert text_of(pieces[0], choice) == text_of(pieces[1], choice)
        assert tokens_of(pieces[0], choice) == tokens_of(pieces[1], choice)
        ends = [
            [(p.finish, p.stopped_by) for p in side if p.choice == choice][-1] for side in pieces
        ]
        assert ends[0] == ends[1]
        assert ends[0][0] is not None
        assert calm.job.choices[choice].kept == rough.job.choices[choice].kept
        if ends[0][0] == "length":
            assert text_of(pieces[0], choice) == vocabulary.decode(draws[choice])
    assert [event.index for event in rough.log] == list(range(len(rough.log)))


def test_a_log_that_is_not_its_own() -> None:
    """A log whose text is not what its tokens give is not gone on from."""
    work = GenerateWork(fingerprint="f", scope="t", prompts=[[1]], max_new=9)
    life = Life(work, VOCABULARIES[0], [[40] * 9])
    life.step()
    life.emit()
    delta = decode_delta(life.log[0].data)
    other = Life(work, VOCABULARIES[1], [[80] * 9])
    other.log = [Event(index=0, kind="progress", data=encode(delta))]
    with pytest.raises(InternalError, match="does not agree"):
        other.begin()
