"""Values nobody thought of: hypothesis makes bodies, targets and raw bytes; some in every run, many in the soak."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.hostile import wire
from tests.support.hostile.clear import clear
from tests.support.hostile.routes import GUARDED, OPERATIONS, fields, put
from tests.support.hostile.world import Witness, World

BODIES = [(operation, path) for operation in OPERATIONS for path, _ in fields(operation)]
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=200),
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=20), inner, max_size=6)
    ),
    max_leaves=30,
)


@given(where=st.sampled_from(BODIES), value=JSON)
@settings(max_examples=max(60, settings().max_examples))
def test_any_value_at_any_field(world: World, home: str, where: Any, value: Any) -> None:
    """Whatever JSON stands at a field, the answer is a result or a clear refusal."""
    operation, path = where
    body = json.dumps(put(operation.body, path, value)).encode()
    clear(world.ask(operation.method, operation.target(home), body), body[:500])


@given(operation=st.sampled_from(GUARDED), noise=st.text(max_size=300), query=st.text(max_size=100))
@settings(max_examples=max(60, settings().max_examples))
def test_any_target(world: World, witness: Witness, operation: Any, noise: str, query: str) -> None:
    """Whatever stands in a target, percent-encoded, the answer is a result or a clear refusal."""
    quoted = "".join(f"%{byte:02x}" for byte in noise.encode("utf-8", "surrogatepass")) or "x"
    names = dict.fromkeys(operation.path_parameters, quoted)
    search = "".join(f"%{byte:02x}" for byte in query.encode("utf-8", "surrogatepass"))
    clear(
        world.ask(operation.method, f"{operation.target('none', **names)}?{search}", operation.body)
    )


@given(raw=st.binary(min_size=1, max_size=500), flips=st.lists(st.integers(0, 200), max_size=5))
@settings(max_examples=max(30, settings().max_examples // 2))
def test_any_bytes(world: World, witness: Witness, raw: bytes, flips: list[int]) -> None:
    """Bytes that are no HTTP, and HTTP with flipped bits, end in a clear refusal or a closed connection."""
    good = bytearray(
        wire.head("POST", "/v1/embeddings", world.keys["mallory"], {"Connection": "close"})
    )
    good += b"Content-Length: 14\r\n\r\n" + b'{"input": "x"}'
    for flip in flips:
        good[flip % len(good)] ^= 1 << flip % 8
    for sent in (raw + b"\r\n\r\n", bytes(good)):
        with wire.connection(world.port) as made:
            made.sendall(sent)
            made.shutdown(1)
            reply = wire.read(made)
        if reply.status:
            clear(reply, sent)
