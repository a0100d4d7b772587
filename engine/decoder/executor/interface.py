"""The interface of executors, between scheduling and computing: batches of sequences in, drawn tokens out. No torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from common.cost.linear import LinearCost
from common.pages.codec import Buffer, Header
from common.pages.identity import PageId
from common.pages.keys import PageKey
from common.types.generation import SamplingParams
from common.types.helper_address import ChannelKind
from common.types.model_card import ModelCard


class TokenFilter(Protocol):
    """A filter of the tokens that may follow in an answer; only the compute thread calls it."""

    def allowed(self, output: Sequence[int]) -> bytes | None:
        """Return one bit for each token id, lowest bit first: whether it may follow `output`; None if all may.

        Raises TokenFilterError if no token may follow.
        """


class TokenFilterError(Exception):
    """The error of a filter that cannot tell which tokens may follow, or allows none; the message has the reason."""


class SamplingRequest(NamedTuple):
    """A request to draw one token from the logits of a sequence's last row.

    `position` is the absolute position of the token being drawn; with seed and choice it keys the random numbers, so
    a draw does not depend on the batch. `prompt` and `output` (tokens so far) are for penalties; `banned` ids are not
    allowed now (the stop ids while `min_new` is not reached); `logprobs` is the number of alternatives to report, -1
    for none. `grammar` filters the ids that may follow `output`.
    """

    sampling: SamplingParams
    choice: int
    position: int
    prompt: Sequence[int]
    output: Sequence[int]
    banned: Sequence[int] = ()
    logprobs: int = -1
    grammar: TokenFilter | None = None


LocalTier = Literal["device", "host"]
# helper: a helper process. late: this process, since the helper was late or had gone. worker: this process, without
# a helper to ask.
AttendedBy = Literal["helper", "late", "worker"]


class PassagePlace(NamedTuple):
    """A part of a passage that is computed alone: its keys and values take the positions [start, end).

    `tokens` are the text's first token, behind which the passage is computed, and the passage's; the passage's first
    token has the position `begin` of the text. Passages with the same `root`, of one model and tenant, share what was
    computed.
    """

    root: PageId
    tokens: Sequence[int]
    begin: int
    start: int
    end: int


class SequenceInput(NamedTuple):
    """One sequence's part of a step: compute `tokens` at `positions`, which rise but need not be contiguous.

    `pages[g][l]` is the physical page of logical page l (positions l * PAGE ...) in layer group g; -1 is a page that
    is not resident because no row of this step can see it (windowed out). The pages of all `positions` are resident,
    and their K and V are written before any row of the step attends. `sample` is the request to draw from the last
    row's logits, None to draw nothing. The last `len(drafts)` tokens are guesses: `sample` then applies to the row
    before the guesses, and `drafts` to the rows of the guesses. `ahead` are requests to draw further tokens: the row of
    each is computed in this step too, once its token is drawn, and its page is resident. A sequence never has both
    `drafts` and `ahead`.

    `home` is the tier of all `pages`, to which keys and values are written, and `attended` the tier that attends to
    these pages: host pages may be copied to the device layer by layer, but device pages never to the host. `part` is
    the sub-batch, 0 or 1: the host attends to one while the device computes the other (NEO, section 3.1). Only
    `execute_staged` takes sequences in two parts, at home on the host, or with a front, and none of these has tokens
    `ahead`. A text is `long` if it exceeds the model's short context: then all its rows and pages use the long
    frequencies.

    With a `front` the home is the device, but the first `front` logical pages are pages of the host, which attends to
    these while the device attends to the rest. A front is whole chunks of pages, and all rows come after it.

    `places` are parts of passages whose keys and values are written before any row of the step attends; a sequence that
    has some may have no `tokens`. Their pages are resident, too.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    pages: Sequence[Sequence[int]]
    sample: SamplingRequest | None = None
    drafts: Sequence[SamplingRequest] = ()
    ahead: Sequence[SamplingRequest] = ()
    home: LocalTier = "device"
    attended: LocalTier = "device"
    part: int = 0
    long: bool = False
    front: int = 0
    places: Sequence[PassagePlace] = ()


class SampledToken(NamedTuple):
    """A drawn token, its log probability under the raw logits, and the likeliest alternatives, likeliest first.

    Without `SamplingRequest.logprobs` the log probability is 0.0 and `top` is empty. `then` are the tokens drawn after
    this one in the same step: after right guesses, or as requested by `ahead`.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]
    then: Sequence[SampledToken] = ()


def run_of(rows: SequenceInput, drawn: Sequence[SampledToken]) -> SampledToken:
    """Return the first token drawn for a sequence, followed by the tokens after right guesses."""
    guesses = rows.tokens[len(rows.tokens) - len(rows.drafts) :]
    count = 1
    for guess, before in zip(guesses, drawn, strict=False):
        if guess != before.token:
            break
        count += 1
    return drawn[0]._replace(then=tuple(drawn[1:count]))


class EarlyEnd:
    """A request to end a step of several tokens per sequence after its present token; any thread may ask."""

    def __init__(self) -> None:
        self.flag = ctypes.c_int64(0)  # compiled kernels read the flag, too

    @property
    def asked(self) -> bool:
        """True once `ask` was called."""
        return bool(self.flag.value)

    def ask(self) -> None:
        """End the step after the token that it is computing."""
        self.flag.value = 1


Draw = Callable[[Sequence[SequenceInput]], Sequence[SampledToken | None]]


def draw_several(
    batch: Sequence[SequenceInput], draw: Draw, early: EarlyEnd | None = None
) -> list[SampledToken | None]:
    """Draw a token of each sequence, then the tokens `ahead`, one after another, each by a call of `draw`."""
    drawn = list(draw(batch))
    then: list[list[SampledToken]] = [[] for _ in batch]
    for number in range(max(len(rows.ahead) for rows in batch)):
        if early is not None and early.asked:
            break
        places = [place for place, rows in enumerate(batch) if number < len(rows.ahead)]
        again = [_next(batch[place], [drawn[place], *then[place]]) for place in places]
        for place, token in zip(places, draw(again), strict=True):
            assert token is not None
            then[place].append(token)
    return [
        first._replace(then=tuple(more)) if first is not None and more else first
        for first, more in zip(drawn, then, strict=True)
    ]


def _next(rows: SequenceInput, drawn: Sequence[SampledToken | None]) -> SequenceInput:
    """Return the row of the token drawn last."""
    draw, known = rows.ahead[len(drawn) - 1], [each.token for each in drawn if each is not None]
    output = [*draw.output, *known]
    position = rows.positions[-1] + len(drawn)
    sample = draw._replace(output=output)
    return SequenceInput([known[-1]], [position], rows.pages, sample, long=rows.long)


class ModelShape(NamedTuple):
    """The shape of a loaded model: the numbers that the scheduler needs.

    The layers of a group share a page table: `windows[g]` is the number of positions that a row of group g sees, itself
    included (None: all); `page_bytes[g]` is the size of one page of the group; `pages` is the number of physical pages,
    numbered from 0, of *each* group. `context` is the length of the longest sequence, `vocabulary` the number of token
    ids. `host_pages` is the number of each group's pages in host memory.
    """

    windows: list[int | None]
    page_bytes: list[int]
    pages: int
    context: int
    vocabulary: int
    host_pages: int = 0


class PageMove(NamedTuple):
    """A copy of one page of a layer group: `load` from a host page to a device page, `save` the other way."""

    kind: Literal["load", "save"]
    group: int
    page_id: PageId
    source: int
    target: int


class StepFailed(Exception):
    """The error of one sequence of a batch; `index` is its place in the batch, `code` the kind of error.

    No token was drawn. The step may be executed again without the sequence, since writing K and V twice is harmless.
    """

    def __init__(self, index: int, message: str, code: str = "model_error") -> None:
        super().__init__(message)
        self.index, self.code = index, code


class HomeMoves:
    """The page copies of sequences that change their home in a step; `layers` counts the layers already copied.

    In each layer all pages are read, then all are written, before the step writes to the layer: so a sequence may take
    a page in the same step in which another sequence leaves it. A step that is executed again copies nothing twice.
    """

    def __init__(self, moves: Sequence[PageMove]) -> None:
        self.moves, self.layers = list(moves), 0


class PageLoads(Protocol):
    """Page loads in progress; after `wait`, `unsound` holds the loads whose bytes differ from the saved bytes."""

    unsound: set[PageMove]

    def wait(self) -> None:
        """Return once all pages have arrived."""


class PageCopier(Protocol):
    """Copies pages between device and host, beside the steps; `load_s` is the mean seconds to load a page."""

    load_s: float
    moved_bytes: dict[str, int]
    moved_s: dict[str, float]

    def load(self, moves: Sequence[PageMove]) -> PageLoads:
        """Begin to copy pages to the device."""

    def save(self, move: PageMove, done: Callable[[PageMove, bool], object]) -> None:
        """Copy one page to the host when there are no loads.

        `done` is called on the copier's thread with the move and whether it succeeded.
        """

    def close(self) -> None:
        """Let the copier's thread end once it has done what it was given."""

    def written(self, pages: Sequence[tuple[int, int]]) -> None:
        """Make the checksums of host pages, given as (group, page), that steps have written.

        They are made before any later task of the copier.
        """

    async def value(self, header: Header, tier: LocalTier, page: int) -> bytes:
        """Return the bytes of a held page, encoded for the tiers below the host."""

    async def fill(self, pages: Sequence[tuple[PageKey, int, Buffer]]) -> dict[PageKey, str]:
        """Write values from a lower tier to host pages; return the errors of damaged values."""

    def layout(self, group: int) -> tuple[int, int]:
        """Return the number of layers of a group's page, and the bytes of one layer."""


class PassageCounts(Protocol):
    """The counts of a store of computed passages: how many were found, or not, and the bytes that it holds."""

    hits: int
    misses: int
    evicted: int
    bytes: int

    def clear(self) -> None:
        """Drop all passages; any thread may call it."""


class Executor(Protocol):
    """A loaded model that executes batches. Not thread-safe: one compute thread calls it.

    `exact`: a row's bits do not depend on other rows, so that guessed tokens may be computed beside it. `grammars`:
    draws obey `SamplingRequest.grammar`. `precomputes`: steps obey `SequenceInput.places`; `passages` counts how often
    computed passages were found again, None if none are kept.
    """

    name: str
    fingerprint: str
    device: str
    dtype: str
    shape: ModelShape
    stop_ids: list[int]
    copier: PageCopier | None
    exact: bool
    grammars: bool
    precomputes: bool
    passages: PassageCounts | None

    def execute(
        self,
        batch: Sequence[SequenceInput],
        loading: PageLoads | None = None,
        early: EarlyEnd | None = None,
    ) -> list[SampledToken | None]:
        """Run one step over all sequences and draw where asked, in the batch's order.

        Each layer waits for its pages in `loading`. After `early` is asked, no further tokens `ahead` are drawn. A
        sequence appears at most once in a batch. Raises StepFailed, if one sequence's numbers are not finite, and
        memory errors.
        """

    def card(self, *, created_ms: int, partitions: int) -> ModelCard:
        """Return the model's card, from which the router renders, tokenizes and names families."""

    def tokenizer_json(self) -> bytes:
        """Return the bytes of tokenizer.json."""


StageName = Literal["before", "device", "staged", "host", "after"]


class StageTime(NamedTuple):
    """The time of one stage of one sub-batch's layer: begin and end in seconds of the monotonic clock.

    The stages `before` and `after` attention read weights; `device`, `staged` (with pages copied from the host) and
    `host` are attention.
    """

    stage: StageName
    part: int
    layer: int
    begin_s: float
    end_s: float


# Bytes over a link: rows and pages sent, results received.
Moved = Literal["rows", "pages", "results"]


class HelperLink(NamedTuple):
    """The link to a helper that attends on the host.

    `cost` are a layer's round-trip seconds, by bytes as tokens; 0 over shared memory. `row_bytes` is the size of a
    row's Q, K, V and O in one layer, `page_bytes` the size of a page in all layers; `moved` counts bytes by kind.
    """

    kind: ChannelKind
    cost: LinearCost = LinearCost(0.0, 0.0, 0.0)
    row_bytes: int = 0
    page_bytes: int = 0
    moved: Mapping[Moved, int] = MappingProxyType({})


class StagedExecutor(Executor, Protocol):
    """An executor that can attend to some of the sequences on the host.

    `attended` counts the rows of steps in stages by the tier that attended to them, `on_both` those of sequences with a
    front, which both tiers attended to and which count as the device's.
    """

    attended: dict[LocalTier, int]

    @property
    def on_both(self) -> int:
        """The rows to which both tiers attended."""

    @property
    def host_layers(self) -> Mapping[AttendedBy, int]:
        """The sub-batch layers attended on the host, counted by who attended; empty if no helper may attach."""

    @property
    def helper_link(self) -> HelperLink | None:
        """The link to the attached helper; None without a helper."""

    @property
    def stage_times(self) -> Sequence[StageTime]:
        """The timed stages of the last step in stages."""

    def execute_staged(
        self,
        batch: Sequence[SequenceInput],
        loading: PageLoads | None = None,
        moves: HomeMoves | None = None,
    ) -> list[SampledToken | None]:
        """Run one step layer by layer, in at most two sub-batches, and draw where asked, in the batch's order.

        Results and errors are those of `execute`, whatever the sequences' homes; also ValueError for a page that no
        tier can attend to. All `moves` are done even after an error. `batch` may be empty if there are moves.
        """
