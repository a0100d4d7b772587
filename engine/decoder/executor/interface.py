"""The executor's interface, between scheduling and computing: batches of sequences in, drawn tokens out. No torch."""

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
    """Which tokens may follow others in an answer; only the compute thread calls it."""

    def allowed(self, output: Sequence[int]) -> bytes | None:
        """Return which token ids may follow `output`, one bit each, the lowest bit first; None if all may.

        Raises TokenFilterError if none may.
        """


class TokenFilterError(Exception):
    """A filter that cannot tell which tokens may follow, or allows none; the message says why."""


class SamplingRequest(NamedTuple):
    """How to draw one token from the logits of a sequence's last row.

    `position` is the absolute position of the token being drawn; with seed and choice it keys the random numbers, so
    a draw does not depend on the batch. `prompt` and `output` (tokens so far) are for penalties; `banned` ids are not
    allowed now (the stop ids while `min_new` is not reached); `logprobs` is how many alternatives to report, -1 none.
    `grammar` says which ids may follow `output`.
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
# A helper process; this process, since the helper was late or had gone; this process, since there was none to ask.
AttendedBy = Literal["helper", "late", "worker"]


class SequenceInput(NamedTuple):
    """One sequence's part of a step: compute `tokens` at `positions`, which rise but need not be contiguous.

    `pages[g][l]` is the physical page of logical page l (positions l * PAGE ...) in layer group g; -1 is a page that
    is not resident because no row of this step can see it (windowed out). The pages of all `positions` are there, and
    their K and V are written before any row of the step attends. `sample` is how to draw from the last row's logits,
    None if they are not wanted. The last `len(drafts)` of the tokens are guesses: `sample` then belongs to the row
    before them, and `drafts` to theirs. `ahead` are the draws of further tokens, each of whose rows is computed in
    this step too, once its token is drawn: their pages are there. Never both `drafts` and `ahead`.

    `home` is the tier of all `pages`, to which keys and values are written, and `attended` the tier that attends to
    them: pages of the host may come to the device layer by layer, those of the device do not go to the host. `part` is
    the sub-batch, 0 or 1: one is attended on the host while the other computes on the device (NEO, section 3.1).
    Only `execute_staged` takes sequences in two parts, or at home on the host, and none of those has tokens `ahead`.
    A text is `long` that is longer than the model's short context: all its rows, and all its pages, are of that kind.
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


class SampledToken(NamedTuple):
    """A drawn token, its log probability under the raw logits, and the likeliest alternatives, likeliest first.

    Without `SamplingRequest.logprobs` the probability is 0.0 and `top` is empty. `then` are the tokens drawn after it
    in the same step: because the guesses up to them were right, or because they were asked for (`ahead`).
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]
    then: Sequence[SampledToken] = ()


def run_of(rows: SequenceInput, drawn: Sequence[SampledToken]) -> SampledToken:
    """Return the first token drawn for a sequence, and then those after right guesses."""
    guesses = rows.tokens[len(rows.tokens) - len(rows.drafts) :]
    count = 1
    for guess, before in zip(guesses, drawn, strict=False):
        if guess != before.token:
            break
        count += 1
    return drawn[0]._replace(then=tuple(drawn[1:count]))


class EarlyEnd:
    """Asks a step of several tokens a sequence to end after the one it is at; any thread may ask."""

    def __init__(self) -> None:
        self.flag = ctypes.c_int64(0)  # compiled kernels read it too

    @property
    def asked(self) -> bool:
        """True once `ask` was called."""
        return bool(self.flag.value)

    def ask(self) -> None:
        """Let the step end; it draws no token more than the one it is at."""
        self.flag.value = 1


Draw = Callable[[Sequence[SequenceInput]], Sequence[SampledToken | None]]


def draw_several(
    batch: Sequence[SequenceInput], draw: Draw, early: EarlyEnd | None = None
) -> list[SampledToken | None]:
    """Draw a token of each sequence, then those `ahead`, one after another; `draw` gives one of each of its rows."""
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
    """The shape of a loaded model, as far as the scheduler needs it.

    Layer groups share a page table: `windows[g]` is the number of positions a row of group g sees, itself included
    (None: all); `page_bytes[g]` is the size of one page of it; `pages` is how many physical pages, numbered from 0,
    *each* group has. `context` is the longest sequence, `vocabulary` the number of token ids. `host_pages` is how many
    pages each group has in host memory.
    """

    windows: list[int | None]
    page_bytes: list[int]
    pages: int
    context: int
    vocabulary: int
    host_pages: int = 0


class PageMove(NamedTuple):
    """A page of a layer group to be copied: `load` from a host page to a device page, `save` the other way."""

    kind: Literal["load", "save"]
    group: int
    page_id: PageId
    source: int
    target: int


class StepFailed(Exception):
    """One sequence of a batch could not be computed; `index` is its place in the batch, `code` the kind of error.

    No token was drawn. The step may be executed again without the sequence: writing K and V twice changes nothing.
    """

    def __init__(self, index: int, message: str, code: str = "model_error") -> None:
        super().__init__(message)
        self.index, self.code = index, code


class HomeMoves:
    """Pages of sequences that change their home in a step; `moves` are loads and saves, `layers` how many are done.

    A layer's pages are all read, and then all written, before the step writes to the layer: a page that a sequence
    leaves may be taken in the same step. A step that is executed again moves nothing twice.
    """

    def __init__(self, moves: Sequence[PageMove]) -> None:
        self.moves, self.layers = list(moves), 0


class PageLoads(Protocol):
    """Page loads under way; after `wait`, `unsound` holds the loads of pages whose bytes are not those saved."""

    unsound: set[PageMove]

    def wait(self) -> None:
        """Return once all pages have arrived."""


class PageCopier(Protocol):
    """Copies pages between device and host, beside the steps; `load_s` is the seconds to load a page from the host."""

    load_s: float
    moved_bytes: dict[str, int]
    moved_s: dict[str, float]

    def load(self, moves: Sequence[PageMove]) -> PageLoads:
        """Begin to copy pages to the device."""

    def save(self, move: PageMove, done: Callable[[PageMove, bool], object]) -> None:
        """Copy one page to the host when there are no loads.

        `done` is called on the copier's thread with the move and whether the page is there.
        """

    def written(self, pages: Sequence[tuple[int, int]]) -> None:
        """Note (group, page) of host pages that steps have written: their bytes are now those that are compared.

        Whatever is asked for later finds the checksums made.
        """

    async def value(self, header: Header, tier: LocalTier, page: int) -> bytes:
        """Return the bytes of a held page in the form of the tiers below the host."""

    async def fill(self, pages: Sequence[tuple[PageKey, int, Buffer]]) -> dict[PageKey, str]:
        """Write values from a lower tier to host pages; return the errors of those that are not sound."""

    def layout(self, group: int) -> tuple[int, int]:
        """Return how many layers a page of a group has, and the bytes of one."""


class Executor(Protocol):
    """A loaded model that executes batches. Not thread-safe: one compute thread calls it.

    `exact` says that a row's bits depend on nothing beside it, so that guessed tokens may be computed with it;
    `grammars` that draws keep to `SamplingRequest.grammar`.
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

    def execute(
        self,
        batch: Sequence[SequenceInput],
        loading: PageLoads | None = None,
        early: EarlyEnd | None = None,
    ) -> list[SampledToken | None]:
        """Run one step over all sequences and draw where asked, in the batch's order.

        A layer waits for its pages that are being loaded. Tokens `ahead` are left out once `early` is asked for. A
        sequence appears at most once in a batch. Raises only what a step can cause: StepFailed, if one sequence's
        numbers are not finite, and memory errors.
        """

    def card(self, *, created_ms: int, partitions: int) -> ModelCard:
        """Return the model's card, by which the router renders, tokenizes and names families."""

    def tokenizer_json(self) -> bytes:
        """Return the bytes of tokenizer.json."""


StageName = Literal["before", "device", "staged", "host", "after"]


class StageTime(NamedTuple):
    """When one stage of one sub-batch's layer ran, in seconds of the clock that does not go back.

    `before` and `after` attention lie the parts that read weights; `device`, `staged` (pages come from the host) and
    `host` are attention.
    """

    stage: StageName
    part: int
    layer: int
    begin_s: float
    end_s: float


# Over a link: rows and pages that are sent, and results that come back.
Moved = Literal["rows", "pages", "results"]


class HelperLink(NamedTuple):
    """The way to a helper that attends on the host.

    `cost` are the seconds of a layer's way there and back, by bytes as tokens: 0 where memory is shared. `row_bytes`
    are those of a row's Q, K, V and O of a layer, `page_bytes` those of a page of all layers; `moved` counts bytes.
    """

    kind: ChannelKind
    cost: LinearCost = LinearCost(0.0, 0.0, 0.0)
    row_bytes: int = 0
    page_bytes: int = 0
    moved: Mapping[Moved, int] = MappingProxyType({})


class StagedExecutor(Executor, Protocol):
    """An executor that can attend to a part of the sequences on the host.

    `attended` counts rows by the tier that attended to them, in steps in stages.
    """

    attended: dict[LocalTier, int]

    @property
    def host_layers(self) -> Mapping[AttendedBy, int]:
        """Layers of sub-batches on the host by who attended, where a helper may attend; else nothing."""

    @property
    def helper_link(self) -> HelperLink | None:
        """The way to the helper that is attached; None without one."""

    @property
    def stage_times(self) -> Sequence[StageTime]:
        """The stages of the last step that was executed in stages."""

    def execute_staged(
        self,
        batch: Sequence[SequenceInput],
        loading: PageLoads | None = None,
        moves: HomeMoves | None = None,
    ) -> list[SampledToken | None]:
        """Run one step layer by layer, in at most two sub-batches, and draw where asked, in the batch's order.

        The result is that of `execute` wherever the sequences are at home, and raises what that raises, and ValueError
        for a page that no tier can attend to. All `moves` are done even if it raises; `batch` may then be empty.
        """
