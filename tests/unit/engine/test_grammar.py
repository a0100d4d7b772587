"""Answers bound to grammars: valid whatever the model draws, and the same tokens however they are computed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from common.errors import InvalidRequest
from common.types.generation import OutputGrammar
from common.types.grammar import MAX_SOURCE_BYTES, definition, fault
from engine.decoder.executor.interface import TokenFilterError
from engine.decoder.generation import Generation
from engine.decoder.sampling.grammar import KEPT, GrammarCompiler
from tests.conftest import PROFILE, SEED
from tests.support.schema_runs import SchemaRun, schema
from tests.support.schemas import SCHEMAS, Schema, faults_of

ROUNDS = 50 if PROFILE == "soak" else 1
SOME = 60  # schemas a run of the tests draws; the soak takes all
REGEX = (
    "(red|green) [0-9]{1,3}",
    "[A-Z][a-z]{0,5}(, [A-Z][a-z]{0,5}){2}",
    "a{3}|b{2}",
    "ä[^a]{0,3}ö",
)
SUM = 'start: term (" + " term){1,3}\nterm: /[0-9]{1,3}/ | "(" /[0-9]/ " * " /[0-9]/ ")"\n'


@pytest.fixture(scope="module")
def run() -> Iterator[SchemaRun]:
    made = SchemaRun(lookup=True, several=4)
    yield made
    made.device.close()


def outcome(generations: Sequence[Generation]) -> list[tuple[list[int], str | None]]:
    """Return the tokens and the end of every choice."""
    assert [g.failure for g in generations] == [None] * len(generations)
    return [(list(c.tokens), c.finish) for g in generations for c in g.choices]


@pytest.mark.soak
def test_there_are_enough_schemas() -> None:
    """Every schema can be used, and its kinds are those that were promised."""
    assert len(SCHEMAS) >= 200
    assert [name for name, each in SCHEMAS.items() if fault(schema(each))] == []
    text = json.dumps(SCHEMAS)
    for word in ("$ref", "anyOf", "oneOf", "allOf", "pattern", "format", "prefixItems"):
        assert f'"{word}"' in text


@pytest.mark.parametrize("form", ["date", "time", "date-time"])
@given(
    st.integers(0, 9999), st.integers(0, 13), st.integers(0, 32), st.integers(0, 24),
    st.integers(0, 60), st.integers(0, 61), st.sampled_from(("Z", "+22:55", "-01:00", "+24:00")),
    st.booleans(),
)  # fmt: skip
def test_only_dates_and_times_that_there_are(
    form: str,
    year: int,
    month: int,
    day: int,
    hour: int,
    minute: int,
    second: int,
    zone: str,
    listed: bool,
) -> None:
    """A date or a time is allowed exactly if a validator takes it, but for leap seconds, which are never written."""
    date, time = f"{year:04}-{month:02}-{day:02}", f"{hour:02}:{minute:02}:{second:02}{zone}"
    said = {"date": date, "time": time, "date-time": f"{date}T{time}"}[form]
    asked: Schema = {"type": "string", "format": form}
    if listed:
        asked = {"properties": {"format": {"items": asked, "maxItems": 2}}, "required": ["format"]}
    text = json.dumps({"format": [said]} if listed else said)
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, definition(OutputGrammar("json_schema", json.dumps(asked))))
    taken = matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()
    leaps = form != "date" and second == 60
    assert taken == (not leaps and faults_of(asked, text) == [])


@pytest.mark.parametrize("round_", range(ROUNDS))
async def test_answers_match_their_schemas(run: SchemaRun, round_: int) -> None:
    """At temperature 1, every answer that was not cut off is what its schema says, by two other validators."""
    rng = random.Random(SEED + round_)
    names = list(SCHEMAS) if PROFILE == "soak" else rng.sample(sorted(SCHEMAS), SOME)
    found = await run.answers(names, rng.getrandbits(60), frequency=0.1)
    whole = {name: text for name, (text, finish) in found.items() if finish == "stop"}
    assert {n: (t, f) for n, t in whole.items() if (f := faults_of(SCHEMAS[n], t))} == {}
    if PROFILE == "soak":
        assert len(whole) >= 0.95 * len(names), sorted(set(names) - set(whole))
    assert len(whole) >= 0.8 * len(names)


async def test_regular_expressions_and_grammars(run: SchemaRun) -> None:
    """A whole answer matches; a grammar's sums can be computed."""
    grammars = [*(OutputGrammar("regex", each) for each in REGEX), OutputGrammar("lark", SUM)]
    made = [run.generation(f"g{n}", each, seed=SEED + n) for n, each in enumerate(grammars * 3)]
    await run.compute(made)
    texts = [(g.choices[0].take(), g.choices[0].finish) for g in made]
    for grammar, (output, finish) in zip(grammars * 3, texts, strict=True):
        assert output is not None
        assert finish == "stop"
        if grammar.kind == "regex":
            assert re.fullmatch(grammar.source, output.text)
        else:
            assert re.fullmatch(r"[0-9+*() ]+", output.text)
            compile(re.sub(r"\b0+(?=[0-9])", "", output.text), "sum", "eval")


async def test_the_same_tokens_however_computed(run: SchemaRun) -> None:
    """Guessed, ahead, several a step, preempted, alone, or from a log on: choices, penalties and bias included."""
    names = ["invoice", "linked list", "tree 2", "random 3", "union of 8", "pattern 10", "person"]
    how: dict[str, Any] = {
        "n": 2,
        "max_new": 120,
        "repetition": 1.1,
        "frequency": 0.2,
        "bias": {40: 1.0},
        "top_p": 0.95,
    }

    def made(by: SchemaRun) -> list[Generation]:
        return [
            by.generation(name, schema(SCHEMAS[name]), seed=SEED + at, **how)
            for at, name in enumerate(names)
        ]

    first = made(run)
    await run.compute(first)
    expected = outcome(first)
    plain = SchemaRun(kv_bytes=4 << 20)  # so few pages that sequences lose theirs
    try:
        again = made(plain)
        await plain.compute(again, ahead=False)
        assert outcome(again) == expected
        assert plain.engine.scheduler.preemptions > 0
        taken_over = made(plain)
        rng = random.Random(SEED)
        for generation, before in zip(taken_over, first, strict=True):
            for choice, old in zip(generation.choices, before.choices, strict=True):
                cut = rng.randrange(len(old.tokens) + 1)
                choice.sequence.resume(old.tokens[:cut])
                for token in old.tokens[:cut]:
                    choice._add(token)
        await plain.compute([g for g in taken_over if not g.over])
        assert outcome(taken_over) == expected
    finally:
        plain.device.close()


async def test_guesses_are_verified_by_the_grammar(run: SchemaRun) -> None:
    """A repeated text is guessed, and a guess is right only where the grammar allows it: the count is kept."""
    before = run.engine.accepted
    made = run.generation("fish", OutputGrammar("regex", "(red fish ){30}!"), seed=SEED)
    await run.compute([made])
    output = made.choices[0].take()
    assert output is not None
    assert output.text == "red fish " * 30 + "!"
    assert run.engine.accepted > before


async def test_torch_draws_valid_answers_too() -> None:
    """The executor without compiled kernels masks the same way."""
    names = ["tuple", "one of, told apart", "enum unicode"]
    torch = SchemaRun(compiled=False)
    try:
        found = await torch.answers(names, SEED, max_new=60)
    finally:
        torch.device.close()
    for name, (text, finish) in found.items():
        assert finish == "length" or faults_of(SCHEMAS[name], text) == []


async def test_logprobs_are_the_models_own(run: SchemaRun) -> None:
    """The probability reported for a token is that of the model, as without a grammar."""
    grammar = OutputGrammar("regex", "a{3}")
    bound = run.generation("bound", grammar, seed=1)
    bound.choices[0]._alternatives = 2
    await run.compute([bound])
    output = bound.choices[0].take()
    assert output is not None
    assert output.text == "aaa"
    assert all(one.logprob < 0 and len(one.top) == 2 for one in output.logprobs)
    assert output.logprobs[0].top[0].raw != b"a"


@given(data=st.data())
def test_a_mask_is_a_function_of_the_tokens(run: SchemaRun, data: st.DataObject) -> None:
    """After any tokens, valid or wrong, in any order of asking, the mask is that of a fresh state."""
    name = data.draw(
        st.sampled_from(["invoice", "linked list", "random 3", "union of 8", "text 4 9"])
    )
    stop_ids = run.executor.stop_ids
    compiled = run.grammars.compile(schema(SCHEMAS[name]), stop_ids)
    kept = compiled.begin()
    valid: list[list[int]] = [[]]
    for _ in range(data.draw(st.integers(1, 12))):
        output = list(data.draw(st.sampled_from(valid)))[: data.draw(st.integers(0, 40))]
        if data.draw(st.booleans()):
            output.append(data.draw(st.integers(0, run.executor.shape.vocabulary - 1)))
        mask = kept.allowed(output)
        assert mask == compiled.begin().allowed(output)
        while mask is not None and len(output) < 40:
            ids = [at for at in range(8 * len(mask)) if mask[at // 8] >> at % 8 & 1]
            output = [*output, data.draw(st.sampled_from(ids))]
            mask = kept.allowed(output)
        valid.append(output[:-1])


class Stuck:
    """A filter that allows anything at first, and then nothing."""

    def allowed(self, output: Sequence[int]) -> bytes | None:
        if len(output) < 3:
            return None
        raise TokenFilterError("no token spells it")


async def test_a_grammar_that_cannot_go_on_fails_alone(run: SchemaRun) -> None:
    """A generation whose grammar allows no token fails with a code of its own, and no other generation does."""
    good = run.generation("good", OutputGrammar("regex", "b{5}"), seed=1)
    bad = run.generation("bad", OutputGrammar("regex", "a{5}"), seed=1)
    bad.choices[0]._grammar = Stuck()
    await run.compute([good, bad])
    assert outcome([good])[0][1] == "stop"
    assert bad.failure is not None
    assert bad.failure[:2] == ("grammar_failed", "no token spells it")


REFUSED: dict[str, tuple[Schema, str]] = {
    "no such file": ({"$ref": "https://example.com/x.json"}, "resource"),
    "negation": ({"not": {"type": "string"}}, "not"),
    "conditions": ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "Unimplemented keys"),
    "look-around": ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    "contradiction": ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
    "unknown format": ({"type": "string", "format": "isbn"}, "Unknown format"),
    "unknown type": ({"type": "text"}, "Invalid type"),
    "unique items": ({"type": "array", "uniqueItems": True}, "Unimplemented keys"),
    "endless reference": ({"$ref": "#"}, "no text"),
    "too large": ({"enum": ["x" * 70_000]}, str(MAX_SOURCE_BYTES)),
    "explosion": (
        {"allOf": [{"anyOf": [{"required": [f"p{i}{j}"]} for j in range(3)]} for i in range(20)]},
        "too large",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused(run: SchemaRun, name: str) -> None:
    """A schema whose keywords would be ignored is refused in a sentence, by router and worker alike."""
    refused, word = REFUSED[name]
    why = fault(schema(refused))
    assert word in why
    assert "\n" not in why
    if name != "too large":
        with pytest.raises(InvalidRequest) as error:
            run.grammars.compile(schema(refused), run.executor.stop_ids)
        assert error.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    ("kind", "source", "word"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", r"(a)\1", "backreferences"),
        ("lark", "start: nothing", "unknown name"),
        ("lark", "start: <|end|>", "special tokens"),
        ("lark", "start: <[5]>", "special tokens"),
        ("lark", "start: @other", "unknown grammar"),
        ("lark", 'begin: "a"', "start"),
        ("json_schema", "[]", "object"),
        ("json_schema", "[" * 100_000, "longer"),
    ],
)
def test_faulty_grammars_are_named(kind: str, source: str, word: str) -> None:
    """The fault of an expression or a grammar is told in one line."""
    why = fault(OutputGrammar(kind, source))  # type: ignore[arg-type]
    assert word in why
    assert len(why.splitlines()) == 1


def test_only_the_last_grammars_are_kept(run: SchemaRun) -> None:
    """A compiler that is given ever new grammars does not grow."""
    compiler = GrammarCompiler(run.vocabulary, run.executor.shape.vocabulary, run.executor.stop_ids)
    for number in range(100):
        compiler.compile(OutputGrammar("regex", f"a{{{number}}}"), run.executor.stop_ids)
    assert len(compiler._compiled) == KEPT
