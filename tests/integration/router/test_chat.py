"""/v1/chat/completions and /v1/completions over a scripted generator: shapes, options, and what is refused."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from common.types.generation import Logprob
from common.wire.results import Piece
from tests.support.chat import CHAT, asks, post, stream, text_of
from tests.support.mesh import Mesh
from tests.support.scripted_generator import FINGERPRINT, NAME, Generator, Scene, byte_tokenizer


async def test_an_answer_has_openais_shape(http: aiohttp.ClientSession, model: Generator) -> None:
    status, answer, headers = await post(http, asks())
    message = {"role": "assistant", "content": "one two three", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    assert status == 200, answer
    assert (answer["object"], answer["model"], answer["choices"]) == (
        "chat.completion",
        NAME,
        [choice],
    )
    usage = answer["usage"]
    assert (
        usage["total_tokens"]
        == usage["prompt_tokens"] + usage["completion_tokens"]
        == 13 + usage["prompt_tokens"]
    )
    assert answer["id"] == f"chatcmpl-{headers['x-request-id'].split('~')[-1]}"


async def test_a_stream_has_openais_shape(
    mesh: Mesh, http: aiohttp.ClientSession, model: Generator
) -> None:
    frames, _ = await stream(http, asks(stream_options={"include_usage": True}))
    metrics = f"http://127.0.0.1:{mesh.router.ports()['health_port']}/metrics"
    async with http.get(metrics) as response:
        seen = await response.text()
    for name in ("time_to_first_token", "time_per_output_token"):
        assert f'spillway_{name}_seconds_count{{model="{NAME}"}}' in seen
    ids = [name for name, _ in frames]
    chunks = [data for _, data in frames[:-1]]
    assert frames[-1] == ("", "[DONE]")
    assert ids == ["", "0.0", "1.0", "2.0", "", ""]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [c["usage"] for c in chunks[:-1]] == [None] * 4
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 13)
    assert text_of(frames) == "one two three"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


async def test_choices_are_interleaved_and_told_apart(
    http: aiohttp.ClientSession, model: Generator
) -> None:
    """n choices come as they are made, each under its own index and with its own end."""

    async def script(scene: Scene) -> None:
        await scene.say(*(Piece(at=0, choice=c, tokens=[65], text=f"{c}a") for c in range(3)))
        await scene.say(Piece(at=0, choice=1, tokens=[66], text="1b", finish="length"))
        await scene.text("0b", 0, finish="stop")
        await scene.say(Piece(at=0, choice=2, finish="stop", stopped_by="END"))
        await scene.end()

    model.script = script
    frames, _ = await stream(http, asks(n=3))
    status, answer, _ = await post(http, asks(n=3))

    assert status == 200
    assert [text_of(frames, choice) for choice in range(3)] == ["0a0b", "1a1b", "2a"]
    ends = {c["index"]: c for _, d in frames[:-1] for c in d["choices"] if c["finish_reason"]}
    whole = {c["index"]: c for c in answer["choices"]}
    for choice in range(3):
        assert whole[choice]["message"]["content"] == text_of(frames, choice)
        assert whole[choice]["finish_reason"] == ends[choice]["finish_reason"]
    assert (ends[1]["finish_reason"], ends[2]["stop_reason"]) == ("length", "END")
    assert [name for name, _ in frames if name] == ["0.0", "0.1", "0.2", "1.1", "2.0", "3.2"]


LOGPROB = Logprob(
    id=65, raw=b"A", logprob=-0.5, top=[Logprob(id=66, raw=b"\xc3", logprob=-float("inf"))]
)


async def test_logprobs_have_openais_shapes(http: aiohttp.ClientSession, model: Generator) -> None:
    """Chat and completions report each token's text, bytes and alternatives, streamed as whole."""

    async def script(scene: Scene) -> None:
        assert scene.work.logprobs == 1
        await scene.say(Piece(at=0, choice=0, tokens=[65, 65], text="A", logprobs=[LOGPROB] * 2))
        await scene.say(
            Piece(at=0, choice=0, tokens=[65], text="AA", finish="stop", logprobs=[LOGPROB])
        )
        await scene.end()

    model.script = script
    _, chat, _ = await post(http, asks(logprobs=True, top_logprobs=1))
    frames, _ = await stream(http, asks(logprobs=True, top_logprobs=1))
    body = {"model": NAME, "prompt": "hi", "logprobs": 1, "max_tokens": 5}
    _, completion, _ = await post(http, body, "/v1/completions")

    one = {"token": "A", "logprob": -0.5, "bytes": [65]}
    top = {"token": "\ufffd", "logprob": -9999.0, "bytes": [195]}
    assert chat["choices"][0]["logprobs"]["content"] == [{**one, "top_logprobs": [top]}] * 3
    streamed = [c["logprobs"] for _, d in frames[:-1] for c in d["choices"] if c["logprobs"]]
    tokens = [token for one in streamed for token in one["content"]]
    assert tokens == chat["choices"][0]["logprobs"]["content"]
    assert completion["choices"][0]["logprobs"] == {
        "tokens": ["A"] * 3,
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"\ufffd": -9999.0}] * 3,
        "text_offset": [0, 1, 2],
    }


@pytest.mark.parametrize(
    ("prompt", "echoed"),
    [("a b", ["a b"]), (["a", "b c"], ["a", "b c"]), ([65, 66], None), ([[65], [66, 67]], None)],
)
async def test_completions_take_every_kind_of_prompt(
    http: aiohttp.ClientSession, model: Generator, prompt: Any, echoed: list[str] | None
) -> None:
    """Texts, token ids and lists of them; n choices of each; echo puts the prompt before its answers."""
    count = 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else 2

    async def script(scene: Scene) -> None:
        for choice in range(2 * count):
            await scene.text(f"<{choice}>", choice, finish="stop")
        await scene.end()

    model.script = script
    body = {"model": NAME, "prompt": prompt, "n": 2, "echo": True}
    status, answer, _ = await post(http, body, "/v1/completions")
    frames, _ = await stream(http, body, "/v1/completions")

    assert status == 200, answer
    assert (answer["object"], frames[0][1]["object"]) == ("text_completion", "text_completion")
    work = model.works[-1]
    assert (len(work.prompts), work.n, work.max_new) == (count, 2, 16)
    texts = echoed or [scene_text(ids) for ids in work.prompts]
    shown = [choice["text"] for choice in answer["choices"]]
    assert shown == [texts[c // 2] + f"<{c}>" for c in range(2 * count)]
    streamed = [
        "".join(c["text"] for _, d in frames[:-1] for c in d["choices"] if c["index"] == i)
        for i in range(2 * count)
    ]
    assert streamed == shown


def scene_text(ids: list[int]) -> str:
    text: str = byte_tokenizer().decode(ids, skip_special_tokens=False)
    return text


async def test_options_reach_the_worker(http: aiohttp.ClientSession, model: Generator) -> None:
    """What a client says is passed on; what it does not say is the model's own; seeds differ unless given."""
    wishes: dict[str, Any] = {
        "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.5, "seed": -1, "logit_bias": {"5": -100}, "stop": ["x", "yy"], "stop_token_ids": [9],
        "min_tokens": 2, "ignore_eos": True, "max_completion_tokens": 7, "max_tokens": 9,
        "user": "u", "metadata": {"a": "b"}, "unknown_field": [1, {"x": None}], "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "stop_reason": None,
    }  # fmt: skip
    status, _, _ = await post(http, asks(**wishes))
    await post(http, asks())
    await post(http, asks())
    given, plain, other = model.works[-3:]
    end = byte_tokenizer().token_to_id("<|im_end|>")

    assert status == 200
    assert end is not None
    s = given.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p) == (0, 0.5, 3, 0.1)
    assert (s.presence, s.frequency, s.repetition, s.bias) == (1, -1, 1.5, {5: -100})
    assert (given.stop, given.stop_ids) == (["x", "yy"], sorted([9, end]))
    assert (given.max_new, given.min_new, given.ignore_eos, given.scope) == (7, 2, True, "default")
    assert (plain.sampling.temperature, plain.sampling.top_p) == (0.7, 0.9)
    assert (plain.stop_ids, plain.max_new, plain.fingerprint) == ([end], 1024, FINGERPRINT)
    assert plain.sampling.seed != other.sampling.seed


async def test_a_low_request_is_generated_last(
    http: aiohttp.ClientSession, model: Generator
) -> None:
    """The worker is told what others go before, on either route."""
    for path, body in ((CHAT, asks()), ("/v1/completions", {"model": NAME, "prompt": "a"})):
        for headers in ({}, {"Spillway-Priority": "low"}):
            status, _, _ = await post(http, body, path, **headers)
            assert status == 200
            assert model.works[-1].low is bool(headers)


BAD: list[tuple[dict[str, Any], int, str, str]] = [
    ({"messages": []}, 400, "invalid_value", "messages"),
    ({"messages": [{"role": "user"}]}, 400, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_value", "messages[0].tool_call_id"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, 400, "unsupported", "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400,
     "unsupported", "messages[0].content[0]"),
    ({"tools": [{"type": "function"}]}, 400, "invalid_value", "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "unsupported", "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f x"}}]}, 400, "invalid_value", "tools[0].function.name"),
    ({"tool_choice": "required"}, 400, "invalid_value", "tool_choice"),
    ({"functions": [{"name": "f"}]}, 400, "unsupported", "functions"),
    ({"audio": {"voice": "x"}}, 400, "unsupported", "audio"),
    ({"modalities": ["audio"]}, 400, "unsupported", "modalities"),
    ({"response_format": {"type": "json_object"}}, 400, "unsupported", "response_format"),  # by this model
    ({"response_format": {"type": "xml"}}, 400, "invalid_value", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, 400, "invalid_value", "response_format"),
    ({"response_format": {"type": "regex"}}, 400, "invalid_value", "response_format"),
    ({"response_format": {"type": "regex", "regex": "("}}, 400, "invalid_grammar", "response_format"),
    ({"response_format": {"type": "grammar", "grammar": "start: x"}}, 400, "invalid_grammar", "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, 400, "invalid_grammar",
     "response_format"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 2}, 400, "unsupported", "min_tokens"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, 400, "unsupported", "ignore_eos"),
    *(({name: value}, 400, "unsupported", name) for name, value in {
        "guided_json": {"type": "object"}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "x",
        "structured_outputs": {"regex": "a"}, "grammar": "root ::= x", "continue_final_message": True,
        "bad_words": ["x"], "allowed_token_ids": [1],
    }.items()),
    ({"temperature": 3}, 400, "invalid_value", "temperature"),
    ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
    ({"n": 17}, 400, "invalid_value", "n"),
    ({"stop": [""]}, 400, "invalid_value", "stop[0]"),
    ({"stop": ["a"] * 17}, 400, "invalid_value", "stop"),
    ({"logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias"),
    ({"logit_bias": {"99999": 1}}, 400, "invalid_token", "logit_bias"),
    ({"stop_token_ids": [-1]}, 400, "invalid_token", "stop_token_ids"),
    ({"top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options"),
    ({"max_tokens": 1995}, 400, "context_length_exceeded", "messages"),
    ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, 400, "invalid_value", "min_tokens"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "context_length_exceeded", "messages"),
    ({"messages": [{"role": "user", "content": "x" * 300_000}]}, 400, "context_length_exceeded", "messages"),
    ({"model": "nobody"}, 404, "model_not_found", "model"),
    ({"session": "nonsense"}, 404, "session_not_found", "session"),
    ({"session": f"chat.{NAME}~0~01m7yj0dt5x5hempndvb6y4j6t"}, 404, "session_not_found", "session"),
    ({"n": 16, "max_tokens": 1900, "messages": [{"role": "user", "content": "x"}], "depth": 1}, 200, "", ""),
]  # fmt: skip


async def test_what_cannot_be_done_is_refused_clearly(
    http: aiohttp.ClientSession, model: Generator
) -> None:
    """Every wrong or unsupported field is a JSON error that names it, also for streams: nothing was sent yet."""
    for change, status, code, param in BAD:
        for streams in (False, True):
            body = {**asks(), **change, "stream": streams}
            if streams and "stream_options" in change:
                continue
            async with http.post("/v1/chat/completions", json=body) as response:
                assert response.status == status, (change, await response.text())
                if status != 200:
                    error = (await response.json())["error"]
                    assert (error["code"], error["param"]) == (code, param), (change, error)
    prompts: list[Any] = [[], ["a", 1], [[]], [70000], None, "x" * 2001]
    wrong: list[dict[str, Any]] = [{"suffix": "x"}, {"echo": True, "logprobs": 1}, {"best_of": 3}]
    wrong += [{"prompt": prompt} for prompt in prompts]
    for change in wrong:
        body = {"model": NAME, "prompt": "x", **change}
        status, error, _ = await post(http, body, "/v1/completions")
        assert (status, set(error["error"])) == (400, {"message", "type", "param", "code"}), error
