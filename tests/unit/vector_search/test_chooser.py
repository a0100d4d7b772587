from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.vector_search.index.chooser import IndexFacts, choose_kind
from services.vector_search.index.port import Kind

MIB = 1 << 20
KINDS: list[Kind] = ["exact", "graph", "ivfpq"]


def facts(live: int, now: Kind = "exact", **more: object) -> IndexFacts:
    known = {
        "dimension": 128,
        "exact_below": 10_000,
        "recall_goal": 0.95,
        "graph_bytes": 8 * MIB,
        "lists_bytes": 2 * MIB,
    }
    return IndexFacts(live=live, now=now, **{**known, **more})  # type: ignore[arg-type]


def test_few_rows_are_compared_and_many_get_a_graph() -> None:
    """The count of rows decides, and the sentence names it and the limit."""
    few, many = choose_kind(facts(9_999)), choose_kind(facts(10_000))

    assert (few.kind, many.kind) == ("exact", "graph")
    assert few.why == (
        "9,999 live vectors of 128 dimensions, fewer than 10,000: comparing every one is quick and always right"
    )
    assert many.why == (
        "10,000 live vectors of 128 dimensions, at least 10,000: a graph finds 95% of the true neighbours "
        "and looks at few of the rows"
    )


def test_codes_take_the_place_of_a_graph_that_memory_has_no_room_for() -> None:
    """A graph fits if there is room for it three times, lists twice, and a quarter more to begin; all is named."""
    short = facts(50_000, room_bytes=30 * MIB - 1)

    assert choose_kind(short).kind == "ivfpq"
    assert (
        "a graph needs 8.0 MiB beside them and twice as much to be built anew or replaced, "
        "codes in lists 2.0 MiB twice, and the process has 30.0 MiB for either"
    ) in choose_kind(short).why
    assert choose_kind(short._replace(room_bytes=30 * MIB)).kind == "graph"
    assert choose_kind(short._replace(now="graph")).kind == "graph"
    assert choose_kind(short._replace(now="graph", room_bytes=24 * MIB - 1)).kind == "ivfpq"
    assert choose_kind(short._replace(room_bytes=5 * MIB)).kind == "ivfpq"
    assert choose_kind(short._replace(room_bytes=5 * MIB - 1)).kind == "exact"
    assert choose_kind(short._replace(room_bytes=1, now="ivfpq")).kind == "ivfpq"
    assert choose_kind(short._replace(room_bytes=1, now="graph")).kind == "graph"


def test_only_exact_search_finds_all() -> None:
    """A goal of every true neighbour leaves one kind, whatever the size."""
    assert choose_kind(facts(10**8, recall_goal=1.0)).kind == "exact"


@given(
    live=st.integers(0, 10**9),
    exact_below=st.integers(0, 10**6),
    room=st.none() | st.integers(-MIB, 1 << 50),
    needed=st.integers(0, 1 << 50),
    codes=st.integers(0, 1 << 50),
    now=st.sampled_from(KINDS),
)
def test_a_choice_is_stable_and_has_a_reason(
    live: int, exact_below: int, room: int | None, needed: int, codes: int, now: Kind
) -> None:
    """What was chosen is chosen again once it is in use, so that no shard goes to and fro; no rows need no graph."""
    asked = facts(
        live, now, exact_below=exact_below, room_bytes=room, graph_bytes=needed, lists_bytes=codes
    )
    choice = choose_kind(asked)

    assert choose_kind(asked._replace(now=choice.kind)).kind == choice.kind
    assert f"{live:,} live vectors" in choice.why
    assert live or choice.kind == "exact"


@given(live=st.integers(0, 10**6), more=st.integers(0, 10**6), now=st.sampled_from(KINDS))
def test_more_rows_never_lose_the_graph(live: int, more: int, now: Kind) -> None:
    """With room for it, a graph that fits some rows fits more of them."""
    if choose_kind(facts(live, now)).kind == "graph":
        assert choose_kind(facts(live + more, now)).kind == "graph"
