"""Health: conditions, probes, and the note that `spillway status` reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from common.errors import ConfigError
from common.health import Health
from tests.support.servers import free_port


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Health, str]]:
    """A health server and its URL."""
    health = Health("router", instance="b", data_dir=str(tmp_path), waits_for=("bus", "model"))
    runner = await health.serve("127.0.0.1", 0, public_port=8080)
    yield health, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def _get(url: str) -> tuple[int, dict[str, object]]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.json()


async def test_ready_when_every_condition_holds(served: tuple[Health, str]) -> None:
    """Ready needs all named conditions; what is missing is told with its reason."""
    health, url = served
    health.set("bus", True)
    health.set("model", False, "loading weights")

    assert await _get(f"{url}/readyz") == (
        503,
        {"service": "router", "ok": False, "reasons": {"model": "loading weights"}},
    )
    assert (await _get(f"{url}/startupz"))[0] == 503
    health.set("model", True)
    assert (await _get(f"{url}/readyz"))[0] == 200
    assert (await _get(f"{url}/health"))[0] == 200
    assert (await _get(f"{url}/startupz"))[0] == 200


async def test_started_stays_when_ready_ends(served: tuple[Health, str]) -> None:
    """A lost bus or a drain ends readiness, neither start-up nor life."""
    health, url = served
    health.set("bus", True)
    health.set("model", True)
    health.set("bus", False, "Redis is away")
    assert [(await _get(f"{url}/{p}"))[0] for p in ("readyz", "startupz", "livez")] == [
        503,
        200,
        200,
    ]

    health.set("bus", True)
    health.draining()
    status, body = await _get(f"{url}/readyz")
    assert (status, body["reasons"]) == (503, {"draining": "the service is stopping"})


async def test_waiting_for_ready(served: tuple[Health, str]) -> None:
    """`?wait` answers 200 when the service becomes ready, not before."""
    health, url = served
    waiting = asyncio.create_task(_get(f"{url}/readyz?wait=20"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    health.set("bus", True)
    health.set("model", True)

    assert (await waiting)[0] == 200
    assert (await _get(f"{url}/readyz?wait=nonsense"))[0] == 200


async def test_who_speaks_no_http_is_told_and_fills_no_log(
    served: tuple[Health, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are not HTTP get 400 and no line in the log; a fault of the server keeps its trace."""
    _, url = served
    host, _, port = url.removeprefix("http://").partition(":")
    for said in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(said)
        assert (await reader.read()).startswith(b"HTTP/1.0 400 ")
        writer.close()
    assert caplog.records == []

    def broken() -> bool:
        raise RuntimeError("broken")

    monkeypatch.setattr(Health, "ready", property(lambda _: broken()))
    async with aiohttp.ClientSession() as session, session.get(f"{url}/readyz") as answer:
        assert answer.status == 500
    assert "RuntimeError: broken" in caplog.text


async def test_note_names_the_real_port(served: tuple[Health, str], tmp_path: Path) -> None:
    """`run/<service>-<instance>.json` names the process and the ports it really has."""
    note = json.loads((tmp_path / "run" / "router-b.json").read_text())

    assert note["health_port"] == int(served[1].rsplit(":", 1)[1])
    assert (note["service"], note["instance"], note["port"]) == ("router", "b", 8080)


async def test_metrics_name_the_build(served: tuple[Health, str]) -> None:
    """/metrics is Prometheus' format and says which build runs."""
    async with aiohttp.ClientSession() as session, session.get(f"{served[1]}/metrics") as answer:
        assert answer.content_type == "text/plain"
        assert 'spillway_build_info{commit="' in await answer.text()


async def test_unnamed_conditions_count_too(tmp_path: Path) -> None:
    """A condition that was not announced is waited for once it has been set; without any, nothing is ready."""
    health = Health("x")
    assert (health.ready, health.reasons) == (False, {"start": "starting"})

    health.set("bus", True)

    assert (health.ready, health.started, health.reasons) == (True, True, {})


async def test_a_data_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """Serving says in one sentence which directory it cannot write, and leaves the port."""
    (tmp_path / "file").touch()
    health = Health("router", data_dir=str(tmp_path / "file"))
    port = free_port()

    with pytest.raises(ConfigError, match=r"SPILLWAY_DATA_DIR is .*/file': .*expected a directory"):
        await health.serve("127.0.0.1", port)
    runner = await Health("router").serve("127.0.0.1", port)
    await runner.cleanup()
