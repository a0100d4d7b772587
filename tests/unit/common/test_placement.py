"""Where the overflow worker computes: on any machine within its cores, high ones first, and beside the services."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.devices import Accelerator, Machine, NumaNode
from common.errors import ConfigError
from common.placement import Placement, kept_cores, overflow_cores, overflow_workers, place


def machine(
    nodes: int = 1,
    each: int = 4,
    *,
    threads: int = 1,
    beside: tuple[int | None, ...] = (0,),
    quota: float | None = None,
    arm: bool = False,
    adjacent: bool = False,
) -> Machine:
    """Return a machine of so many nodes with so many physical cores each.

    Second hardware threads follow after all first ones, or are `adjacent`; `beside` are the accelerators' nodes.
    """
    count = nodes * each
    groups = tuple(tuple(core + count * t for t in range(threads)) for core in range(count))
    if adjacent:
        groups = tuple(tuple(range(n * threads, (n + 1) * threads)) for n in range(count))
    return Machine(
        cores=tuple(range(count * threads)),
        physical=groups,
        nodes=tuple(
            NumaNode(n, tuple(sorted(core for group in groups[n * each : (n + 1) * each] for core in group)))
            for n in range(nodes)
        ),
        accelerators=tuple(Accelerator("nvidia", "GPU", "/dev/nvidia0", node) for node in beside),
        abilities=("asimd",) if arm else ("avx2",),
        quota_cores=quota,
    )  # fmt: skip


MACHINES = st.builds(
    machine,
    st.integers(1, 4),
    st.integers(1, 40),
    threads=st.integers(1, 2),
    beside=st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=3).map(tuple),
    quota=st.none() | st.floats(0.1, 200),
    arm=st.booleans(),
    adjacent=st.booleans(),
)


@given(MACHINES)
def test_within_one_node_and_beside_the_services(found: Machine) -> None:
    """At least one core; one of each physical core; within one node; the lowest are left where there are more."""
    chosen = overflow_cores(found)
    kept = {core for group in found.physical[: kept_cores(found)] for core in group}
    groups = [group for group in found.physical if set(group) & set(chosen)]

    assert 1 <= len(chosen) == len(groups)
    assert list(chosen) == sorted(chosen)
    assert sum(bool(set(chosen) & set(node.cores)) for node in found.nodes) == 1
    assert not kept & set(chosen)
    if found.quota_cores is not None:
        assert len(chosen) <= max(1, found.quota_cores)


@given(MACHINES)
def test_from_the_highest_downwards(found: Machine) -> None:
    """No core of the chosen node that is left out stands above one that is taken, second threads apart."""
    chosen = set(overflow_cores(found))
    (home,) = (set(node.cores) for node in found.nodes if chosen & set(node.cores))
    highest = {max(group) for group in found.physical} & home

    assert chosen <= highest
    assert min(chosen) > max(highest - chosen, default=-1)


@given(MACHINES, st.integers(1, 400))
def test_as_many_as_asked(found: Machine, threads: int) -> None:
    """A count asked for is had while there are cores, and second hardware threads come last within a node."""
    chosen = overflow_cores(found, threads=threads)
    touched = [node for node in found.nodes if set(node.cores) & set(chosen)]

    assert len(set(chosen)) == len(chosen) == min(threads, len(found.cores))
    assert set(chosen) <= set(found.cores)
    if len(touched) == 1 and not set(chosen) & set(found.physical[0]):
        doubled = [g for g in found.physical if len(set(g) & set(chosen)) > 1]
        free = [
            group
            for group in found.physical[kept_cores(found) :]
            if set(group) <= set(touched[0].cores) and not set(group) & set(chosen)
        ]
        assert not (doubled and free)


@pytest.mark.parametrize(
    ("found", "cores"),
    [
        (machine(1, 1), (0,)),
        (machine(1, 2), (1,)),
        (
            machine(1, 1, threads=2),
            (1,),
        ),  # two threads of one physical core: one worker, one thread
        (machine(1, 4), (2, 3)),
        (machine(1, 4, beside=(0, 0)), (3,)),
        (machine(1, 4, threads=2), (6, 7)),
        (machine(1, 4, threads=2, adjacent=True), (5, 7)),
        (machine(2, 4), (4, 5, 6, 7)),  # away from the accelerator's node
        (machine(2, 4, beside=(1,)), (2, 3)),  # half as many as the other node's: enough
        (machine(2, 3, beside=(1,)), (3, 4, 5)),  # one of three is not
        (machine(2, 4, beside=(None,)), (4, 5, 6, 7)),
        (machine(3, 4), (8, 9, 10, 11)),  # of equals the highest
        (machine(1, 8, quota=5.9), (5, 6, 7)),  # five, less those for services and driver
        (machine(1, 8, quota=0.5), (7,)),
        (machine(1, 128, arm=True), tuple(range(32, 128))),  # the paper's: 96 of 128 at most
        (machine(1, 128), tuple(range(2, 128))),
    ],
)
def test_examples(found: Machine, cores: tuple[int, ...]) -> None:
    """Machines as they are met, the paper's ARM server among them."""
    assert overflow_cores(found) == cores


@pytest.mark.parametrize(
    ("found", "threads", "cores"),
    [
        (machine(1, 4, threads=2), 3, (3, 6, 7)),  # a second thread before what is kept
        (machine(1, 4, threads=2), 5, (2, 3, 5, 6, 7)),
        (machine(2, 4, beside=(1,)), 2, (2, 3)),
        (machine(2, 4, beside=(1,)), 3, (5, 6, 7)),  # too many for the other node
        (machine(2, 4), 6, (2, 3, 4, 5, 6, 7)),  # more than a node has
        (machine(1, 4, quota=1.0), 3, (1, 2, 3)),
    ],
)
def test_examples_of_a_count(found: Machine, threads: int, cores: tuple[int, ...]) -> None:
    """A count is obeyed, and chooses the node that has it."""
    assert overflow_cores(found, threads=threads) == cores


def test_the_caller_may_keep_more() -> None:
    """`reserve` takes the place of what is kept by rule, and leaves a core in any case."""
    assert overflow_cores(machine(1, 8), reserve=5) == (5, 6, 7)
    assert overflow_cores(machine(1, 8), reserve=0) == tuple(range(8))
    assert overflow_cores(machine(1, 8), reserve=99) == (7,)


@given(MACHINES, st.integers(0, 64))
def test_place(found: Machine, threads: int) -> None:
    """Pinned beside an accelerator, unless a quota shares the machine; a count that was asked for is the count."""
    cores, count = place(found, threads=threads)
    shared = found.quota_cores is not None and found.quota_cores < len(found.cores)

    assert bool(cores) != shared
    assert count == (threads or len(overflow_cores(found)))


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (2.5, 2)])
def test_one_kind_of_device_is_not_pinned(quota: float | None, threads: int) -> None:
    """Without an accelerator every usable core computes, wherever the scheduler likes."""
    assert place(machine(1, 8, beside=(), quota=quota)) == Placement((), threads)


def test_cores_of_ones_own() -> None:
    """SPILLWAY_CORES is obeyed on any machine; SPILLWAY_THREADS still counts."""
    assert place(machine(1, 8, beside=()), cores="1-2,7") == Placement((1, 2, 7), 3)
    assert place(machine(1, 8), cores="1-2,7", threads=2) == Placement((1, 2, 7), 2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x", "SPILLWAY_CORES is 'x': 'x' is neither a core's number nor a range of them"),
        ("0-7,9-12", "this process may not run on 9-12; expected cores out of 0-7"),
    ],
)
def test_cores_that_cannot_be_had(text: str, sentence: str) -> None:
    """What is no list, and cores of others, are refused with what is expected."""
    with pytest.raises(ConfigError, match=sentence):
        place(machine(1, 8), cores=text)


def test_how_many_workers() -> None:
    """Auto is one where there is an accelerator; a number is obeyed on any machine."""
    assert [overflow_workers(machine(beside=on), "auto") for on in ((), (0,), (0, 0))] == [0, 1, 1]
    assert overflow_workers(machine(beside=()), 2) == 2
    assert overflow_workers(machine(), 0) == 0
