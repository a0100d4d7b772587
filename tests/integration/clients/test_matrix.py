"""Packages that others write get from this server what a plain request gets: the same words, vectors and orders."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients import calls
from tests.clients.environments import ENVIRONMENTS, HOW, python
from tests.conftest import PROFILE
from tests.support.mesh import ROOT, Mesh

# Clients of each environment, with what they must be able to get.
CASES = [
    (environment, client)
    for environment, packages in ENVIRONMENTS.items()
    for client in calls.CLIENTS
    if any(package.startswith(client.replace("_", "-")) for package in packages)
]
RUNS = 20 if PROFILE == "soak" else 1


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """A mesh with an encoder and two generators, one of them real."""
    made = Mesh()
    flags = ("--device", "cpu", "--embed-model", "none", "--threads", "1", "--chat-dtype", "fp32")
    made.add("gpu_worker", "real", *flags, "--chat-model", calls.REAL)
    made.add_generator()
    made.wait_generator(made.url, calls.REAL)
    yield made
    made.close()


def _asked(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    raw = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(f"{url}{path}", data=raw, timeout=120) as response:
        return json.load(response)


@pytest.fixture(scope="module")
def expected(mesh: Mesh) -> dict[str, Any]:
    """What plain requests get, by the names of `calls`."""
    url, options, texts = mesh.url, calls.OPTIONS, calls.TEXTS
    chat = _asked(
        url, "/v1/chat/completions", {"model": calls.CHAT, "messages": calls.MESSAGES, **options}
    )
    answer = chat["choices"][0]["message"]["content"]
    plain = _asked(url, "/v1/completions", {"model": calls.CHAT, "prompt": calls.ASK, **options})
    vectors = _asked(url, "/v1/embeddings", {"model": calls.EMBED, "input": texts})
    ranked = _asked(
        url, "/v1/rerank", {"model": calls.EMBED, "query": calls.QUERY, "documents": texts}
    )
    response = _response(url, calls.MESSAGES)
    talk = [calls.MESSAGES[1], {"role": "assistant", "content": response}, calls.MESSAGES[1]]
    order = [hit["index"] for hit in ranked["results"]]
    return {
        "chat": answer,
        "stream": answer,
        "usage": [chat["usage"]["total_tokens"]] * 2,
        "completion": plain["choices"][0]["text"],
        "embeddings": [item["embedding"] for item in vectors["data"]],
        "rerank": order,
        "rerank v1": order,
        "responses": response,
        "responses stream": response,
        "responses state": _response(url, talk),
        "info": _asked(url, "/info")["model_id"],
        "overflow": True,
        "bound": True,
    }


def _response(url: str, messages: list[Any]) -> str:
    """Return what a greedy chat says, which a response says too."""
    body = {"model": calls.CHAT, "messages": messages, "temperature": 0, "max_tokens": 24}
    found: str = _asked(url, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    return found


@pytest.mark.timeout(3600 if PROFILE == "soak" else 300)
@pytest.mark.parametrize(("environment", "client"), CASES)
def test_a_client_gets_what_a_plain_request_gets(
    environment: str, client: str, mesh: Mesh, expected: dict[str, Any]
) -> None:
    """Answers are compared in content: texts as they are, vectors number by number, orders of documents."""
    interpreter = python(environment)
    if interpreter is None:
        pytest.skip(f"no packages of clients: `{HOW}` installs them")
    for _ in range(RUNS):
        words = [str(interpreter), str(ROOT / "tests/clients/calls.py"), client, mesh.url]
        done = subprocess.run(
            words, cwd=mesh.directory, capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found = json.loads(done.stdout.strip().splitlines()[-1])
        vectors = found.pop("embeddings", [])
        assert found == {name: expected[name] for name in found}
        for one, other in zip(vectors, expected["embeddings"], strict=False):
            assert one == pytest.approx(other, abs=1e-6)
        assert len(vectors) in {0, len(calls.TEXTS)}


def test_every_client_is_in_the_document() -> None:
    """docs/clients.md names each client with the versions that were run."""
    table = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
    for environment, client in CASES:
        packages = ENVIRONMENTS[environment]
        for package in packages:
            if package.startswith(client.replace("_", "-")):
                name, _, version = package.partition("==")
                assert version in table, f"docs/clients.md lacks {name} {version}"
