"""The chat client against a server that does what it is told: dropped connections, repeats, refusals."""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from loadgen import command
from loadgen.chat import cli
from loadgen.chat.client import Chat
from loadgen.chat.load import Asking, ChatLoad
from loadgen.chat.replies import Goal
from loadgen.chat.scripts import Lengths, Say, Script, ScriptShape, scripts
from loadgen.target import Target

TEXT = ["Once", " upon", " a", " time", "."]
REQUEST = "chat.test~0~01hzzzzzzzzzzzzzzzzzzzzzzz"


class Router:
    """Streams TEXT by the SSE contract; `cuts` is after how many pieces each connection is dropped."""

    def __init__(self) -> None:
        self.cuts: list[int] = []
        self.refuse: list[int] = []
        self.repeat = 0
        self.spoil: dict[int, str] = {}
        self.seen: list[tuple[str, str, dict[str, Any]]] = []
        self.keys: set[str] = set()
        self.url = ""

    async def ask(self, request: web.Request) -> web.StreamResponse:
        self.keys.add(request.headers.get("Idempotency-Key", ""))
        self.seen.append(("POST", "", await request.json()))
        return await self._stream(request, 0)

    async def events(self, request: web.Request) -> web.StreamResponse:
        last = request.headers["Last-Event-ID"]
        self.seen.append(("GET", last, {}))
        return await self._stream(request, max(0, int(last.partition(".")[0]) + 1 - self.repeat))

    async def session(self, request: web.Request) -> web.Response:
        return web.json_response({"id": f"s{len(self.seen)}"}, status=201)

    async def _stream(self, request: web.Request, start: int) -> web.StreamResponse:
        if self.refuse:
            status = self.refuse.pop(0)
            error = {"code": "depth", "message": "full"}
            return web.json_response({"error": error}, status=status, headers={"Retry-After": "0"})
        response = web.StreamResponse(headers={"x-request-id": REQUEST})
        await response.prepare(request)
        await response.write(b": ping\n\n" + _chunk({"role": "assistant", "content": ""}))
        cut = self.cuts.pop(0) if self.cuts else len(TEXT) + 1
        for index in range(start, len(TEXT)):
            if index - start == cut:
                assert request.transport is not None
                request.transport.close()
                return response
            await response.write(self._piece(index))
        usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
        await response.write(b'data: {"choices":[],"usage":%s}\n\n' % json.dumps(usage).encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _piece(self, index: int) -> bytes:
        text = self.spoil.pop(index, TEXT[index])
        finish = "stop" if index == len(TEXT) - 1 else None
        return b"id: %d.0\n" % index + _chunk({"content": text}, finish)


def _chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: %s\n\n" % json.dumps({"choices": [choice], "usage": None}).encode()


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    """A router of our own on a free port."""
    found, app = Router(), web.Application()
    app.router.add_post("/v1/chat/completions", found.ask)
    app.router.add_get("/v1/requests/{id}/events", found.events)
    app.router.add_post("/v1/sessions", found.session)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = "http://{}:{}".format(*runner.addresses[0][:2])
    yield found
    await runner.cleanup()


async def test_a_stream_is_put_together(router: Router) -> None:
    """Text, finish, usage and one moment a piece."""
    async with Chat([router.url]) as chat:
        found = await chat.ask({"messages": []})

    assert found.ok
    assert (found.text, found.finish) == ("".join(TEXT), {0: "stop"})
    assert (found.prompt_tokens, found.output_tokens, len(found.at_s)) == (9, 5, 5)
    assert found.request == REQUEST
    assert found.at_s == sorted(found.at_s)


async def test_a_resumable_stream_goes_on_where_it_was(router: Router) -> None:
    """After every drop the next connection names the last piece, and nothing is lost or doubled."""
    router.cuts, router.refuse = [2, 1, 0], [429, 503]
    async with Chat([router.url], resume_s=30) as chat:
        found = await chat.ask({"messages": []}, key="k")
        broken = chat.broken.total()

    assert found.ok
    assert found.text == "".join(TEXT)
    assert [(how, last) for how, last, _ in router.seen] == [
        *[("POST", "")] * 3, ("GET", "1.0"), ("GET", "2.0"), ("GET", "2.0"),
    ]  # fmt: skip
    assert router.keys == {"k"}
    assert (found.resumes, broken) == (3, 5)


async def test_pieces_that_come_again_count_once(router: Router) -> None:
    """A router that begins a little earlier than asked changes nothing; a changed piece is told."""
    router.cuts, router.repeat = [3], 2
    async with Chat([router.url], resume_s=30) as chat:
        same = await chat.ask({"messages": []})
        router.cuts = [3]
        router.spoil = {2: " A"}
        other = await chat.ask({"messages": []})

    assert (same.ok, same.text, same.repeated) == (True, "".join(TEXT), 2)
    assert not other.ok
    assert "changed from ' A' to ' a'" in other.wrong[0]


async def test_an_attached_stream_that_is_cut_has_failed(router: Router) -> None:
    """Without a resume the first failure is the answer: a cut, a refusal, a closed port."""
    router.cuts = [2]
    async with Chat([router.url]) as chat:
        cut = await chat.ask({"messages": []})
        router.refuse = [429]
        refused = await chat.ask({"messages": []})
    async with Chat(["http://127.0.0.1:1"]) as chat:
        gone = await chat.ask({"messages": []})

    assert not cut.ok
    assert (cut.code, cut.text) == ("ClientPayloadError", "Once upon")
    assert (refused.status, refused.code) == (429, "depth")
    assert (gone.status, gone.code) == (0, "ClientConnectorError")
    assert router.keys == {""}


async def test_a_deadline_ends_a_client_that_never_gives_up(router: Router) -> None:
    """A resumable client that is refused for ever ends by its own timeout, with a code."""
    router.refuse = [503] * 1000
    async with Chat([router.url], resume_s=30, timeout_s=0.5) as chat:
        found = await chat.ask({"messages": []})

    assert found.code == "client_timeout"


async def test_sessions_send_only_what_is_new(router: Router) -> None:
    """A session's turns carry one message each; without sessions each carries the whole history."""
    script = Script(1, tuple(Say(f"say {i}", 5) for i in range(3)))
    for how, lengths in (("session", [1, 1, 1]), ("stateless", [1, 3, 5])):
        router.seen.clear()
        async with Chat([router.url]) as chat, Target([router.url]) as target:
            load = ChatLoad(chat, target, iter([script]), Asking(how=how))  # type: ignore[arg-type]
            run = await load.closed(1, count=1)
        bodies = [body for _, _, body in router.seen]

        assert [len(body["messages"]) for body in bodies] == lengths
        assert {"session" in body for body in bodies} == {how == "session"}
        assert [reply.turn for reply in run.replies] == [0, 1, 2]
        assert run.summary(Goal(9, 9))["within_goal"] == 1.0
    assert bodies[-1]["messages"][1] == {"role": "assistant", "content": "".join(TEXT)}


async def test_an_open_loop_of_conversations_counts_every_turn(router: Router) -> None:
    """Every arrival has its conversation, every turn its reply, and a refused one ends its conversation."""
    shape = ScriptShape(prompt=Lengths(5.0), output=Lengths(5.0), turns=2.0, think_s=0.01)
    async with Chat([router.url]) as chat, Target([router.url]) as target:
        load = ChatLoad(chat, target, scripts(shape, 1), Asking())
        run = await load.open(iter([0.0, 0.01, 0.02, 9.0]), 1.0)
        router.refuse = [429]
        refused = await load.closed(1, count=1)

    wanted = [len(script.says) for script, _ in zip(scripts(shape, 1), range(3), strict=False)]
    assert len(run.replies) == sum(wanted)
    assert all(reply.ok for reply in run.replies)
    assert refused.summary(Goal())["refused"] == 1
    assert load.in_flight == 0


@pytest.mark.parametrize("mode", ["open", "closed"])
@pytest.mark.parametrize("kind", ["chat", "multi-turn", "grounded"])
async def test_the_command_line_drives_every_kind(
    router: Router, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, mode: str
) -> None:
    """Options become requests of that kind; summary and raw rows are printed and stored."""
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    words = f"--kind {kind} --mode {mode} --rate 20 --arrivals steady --clients 2 --seconds 0.3"
    words += " --turns 2 --think 10ms --temperature 0.5 --collection c -k 4 --ttft 9s --tpot 9s"
    options = parser.parse_args([*words.split(), "--json", str(tmp_path / "load.json")])
    talk = await cli.drive(options, [router.url])

    assert cli.finish(options, talk, []) == 0
    stored = json.loads((tmp_path / "load.json").read_text())
    assert stored["summary"]["ok"] == len(stored["samples"]) == len(router.seen) > 0
    assert stored["summary"]["within_goal"] == 1.0
    assert "goodput at TTFT 9 s, TPOT 9 s" in capsys.readouterr().out
    bodies = [body for _, _, body in router.seen]
    assert {body["temperature"] for body in bodies} == {0.5}
    wanted = {"collection": "c", "k": 4} if kind == "grounded" else None
    assert all(body.get("retrieval") == wanted for body in bodies)
    assert any("session" in body for body in bodies) == (kind == "multi-turn")
