"""Hostile input: whatever arrives, the answer is a clear error in the usual shape, and the next request is served."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import ssl
import subprocess
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from common.config import RouterConfig
from common.errors import ConfigError
from services.router.assembly import keys_needed
from services.router.service import tls_context
from tests.support.mesh import Mesh


@pytest.fixture(scope="module")
def strict(mesh: Mesh) -> Iterator[str]:
    """The URL of a router with small limits."""
    flags = ("--body-timeout-s", "1", "--max-body-bytes", "100000", "--max-connections", "6")
    router = mesh.add_router("strict", *flags)
    url = mesh.address(router)
    mesh.wait_ready(url)
    yield url
    assert router.stop() == 0


async def raw(url: str, data: bytes, *, wait_s: float = 60.0, half_close: bool = False) -> bytes:
    """Send bytes as they are and return everything that comes back until the server closes the connection."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(data)
    await writer.drain()
    if half_close:
        writer.write_eof()
    answer = b""
    try:
        async with asyncio.timeout(wait_s):
            while chunk := await reader.read(65536):
                answer += chunk
    finally:
        writer.close()
    return answer


def body_of(answer: bytes) -> Any:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


BODIES = [
    (b"", "invalid_json"),
    (b"   ", "invalid_json"),
    (b"{", "invalid_json"),
    (b"nonsense", "invalid_json"),
    (b'{"input": NaN}', "invalid_json"),
    (b'{"input": [Infinity]}', "invalid_json"),
    (b'{"input": "\xff\xfe"}', "invalid_utf8"),
    (b'{"\xff": 1, "input": "x"}', "invalid_utf8"),
    (b'{"input": "\\ud800"}', "invalid_json"),
    (b"[]", "invalid_value"),
    (b"null", "invalid_value"),
    (b"1e999", "invalid_value"),
    (b'{"input": 1e999}', "invalid_value"),
    (b'{"input": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", None),
    (b'{"x": ' + b"[" * 49_000 + b"]" * 49_000 + b', "input": "x"}', "too_deep"),
    (b'{"x": ' + b'{"a":' * 20_000, None),
]
POSTS = (
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v1/collections",
    "/v1/collections/{c}/documents",
    "/v1/collections/{c}/search",
    "/v1/collections/{c}/documents/delete",
)


@pytest.mark.parametrize(("body", "code"), BODIES)
async def test_bodies_that_are_none(
    http: aiohttp.ClientSession, name: str, body: bytes, code: str | None
) -> None:
    """Every broken body is a 400 on every route that takes one."""
    for path in POSTS:
        async with http.post(path.format(c=name), data=body) as response:
            error = (await response.json())["error"]

            assert (response.status, error["type"]) == (400, "invalid_request_error"), path
            if path == "/v1/embeddings" and code:
                assert error["code"] == code


async def test_deep_and_large_json_values(http: aiohttp.ClientSession, name: str) -> None:
    """Metadata and filters too deep, too large or beyond 64 bits are refused."""
    deep: Any = 1
    for _ in range(40):
        deep = {"a": deep}
    cases = [
        ({"text": "x", "metadata": {"d": deep}}, 400, "too_deep"),
        ({"text": "x", "metadata": {"n": 2**64}}, 400, "invalid_value"),
        ({"text": "x", "metadata": {"n": "y" * 70_000}}, 413, "too_large"),
        ({"text": "x" * 1_100_000}, 413, "too_large"),
        ({"text": "x", "id": "i" * 600}, 400, "invalid_id"),
    ]
    for document, status, code in cases:
        data = io.BytesIO(json.dumps({"documents": [document]}).encode())
        async with http.post(f"/v1/collections/{name}/documents", data=data) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (status, code)
    async with http.post(
        f"/v1/collections/{name}/search", json={"text": "x", "filter": {"d": deep}}
    ) as got:
        assert (got.status, (await got.json())["error"]["code"]) == (400, "too_deep")


PATHS = [
    ("/v1/collections/..%2f..%2fetc%2fpasswd", 404),
    ("/v1/collections/../../etc/passwd", 404),
    ("/v1/collections/%00", 400),
    ("/v1/collections/a%0d%0aX-Evil:1", 400),
    ("/v1/collections/.hidden", 404),
    ("/v1/collections/%ff", 404),
    ("/v1/collections/x/documents/%ff", 404),
    ("/v1/collections//documents", 404),
    ("//v1/models", 404),
    ("/v1/models/", 404),
    ("/v1/models/" + "a" * 4000, 404),
    ("/v1/requests/..%2f..", 404),
    ("/%2e%2e/%2e%2e/etc/passwd", 404),
]


@pytest.mark.parametrize(("path", "status"), PATHS)
async def test_path_tricks(mesh: Mesh, path: str, status: int) -> None:
    """Paths that try to leave their place find nothing."""
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    got, body = body_of(await raw(mesh.url, request))

    assert (got, body["error"]["type"]) == (status, "invalid_request_error")


HTTP = [
    b"NONSENSE\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X-Long: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(5000)) + b"\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    bytes(range(256)) * 20,
]


@pytest.mark.parametrize("data", HTTP)
async def test_what_is_no_http(mesh: Mesh, http: aiohttp.ClientSession, data: bytes) -> None:
    """Bytes that are no request are a 400, or a closed connection, and nothing else is disturbed."""
    answer = await raw(mesh.url, data, half_close=True)

    assert answer == b"" or answer.split()[1] == b"400", answer[:200]
    async with http.post("/v1/embeddings", json={"input": "still there"}) as response:
        assert response.status == 200


async def after_a_request(url: str, data: bytes) -> bytes:
    """Send bytes on a connection that a request was answered on; return what comes until it is closed."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().splitlines() if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.split(b":")[1]))
    writer.write(data)
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_slow_bodies_and_slow_headers(strict: str) -> None:
    """A body that does not arrive is a 408; so is a head that does not arrive, a connection's first or a later one."""
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    slow_body, slow_head, later_head = await asyncio.gather(
        raw(strict, head),
        raw(strict, b"POST /v1/embeddings HTTP/1.1\r\nHost:"),
        after_a_request(strict, b"GET /livez HTTP"),
    )

    assert body_of(slow_body)[0] == 408
    assert body_of(slow_head)[0] == 408
    assert body_of(later_head)[0] == 408
    assert await after_a_request(strict, b"") == b""


async def test_bodies_over_the_limit(strict: str) -> None:
    """Too large is a 413, said at once, sent in pieces, or packed."""
    large = json.dumps({"input": "x" * 200_000}).encode()

    async def pieces() -> Any:
        for first in range(0, len(large), 20_000):
            yield large[first : first + 20_000]

    packed = gzip.compress(large * 50)
    async with aiohttp.ClientSession(strict) as session:
        for data, headers in ((large, {}), (pieces(), {}), (packed, {"Content-Encoding": "gzip"})):
            async with session.post("/v1/embeddings", data=data, headers=headers) as response:
                assert response.status == 413
                assert (await response.json())["error"]["code"] == "body_too_large"


async def test_too_many_connections(strict: str) -> None:
    """Connections over the limit get a 503 and are closed; those there go on."""
    parts = urlsplit(strict)
    held = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(6)]
    answer = await raw(strict, b"")
    for _, writer in held:
        writer.close()

    status, body = body_of(answer)
    assert (status, body["error"]["code"]) == (503, "too_many_connections")


async def test_half_closed_connections(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    """A client that closes its side early harms nobody."""
    request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    await asyncio.gather(*(raw(mesh.url, request, half_close=True) for _ in range(20)))
    async with http.get("/v1/models") as response:
        assert response.status == 200


async def test_verbs(http: aiohttp.ClientSession) -> None:
    """HEAD answers like GET without a body, OPTIONS says what is allowed, others are a 405 in the usual shape."""
    async with http.head("/v1/models") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with http.options("/v1/embeddings") as response:
        assert (response.status, response.headers["Allow"]) == (204, "POST, OPTIONS")
    for verb in ("PUT", "PATCH", "TRACE"):
        async with http.request(verb, "/v1/models") as response:
            assert response.status == 405
            assert "GET" in response.headers["Allow"]
            assert (await response.json())["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "headers",
    [
        {"Spillway-Timeout": "soon"},
        {"Spillway-Timeout": "nan"},
        {"Spillway-Timeout": "-1"},
        {"Spillway-Timeout": "inf"},
        {"Spillway-Resume": "x"},
        {"Idempotency-Key": "k" * 256},
    ],
)
async def test_headers_that_make_no_sense(
    http: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    """Our headers are checked."""
    async with http.post("/v1/embeddings", json={"input": "x"}, headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (
            400,
            "invalid_header",
        )


async def test_any_content_type_is_read_as_json(http: aiohttp.ClientSession) -> None:
    """A wrong content type is tolerated where the body is JSON."""
    headers = {"Content-Type": "text/plain"}
    async with http.post("/v1/embeddings", data=b'{"input": "x"}', headers=headers) as response:
        assert response.status == 200


def test_keys_are_needed_where_others_can_come() -> None:
    """auto: off on loopback, on elsewhere."""
    answers = {
        (host, keys): keys_needed(RouterConfig(host=host, keys=keys))
        for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "192.0.2.1", "example.org")
        for keys in ("auto", "on", "off")
    }

    for (host, keys), needed in answers.items():
        loopback = host in {"127.0.0.1", "::1", "localhost"}
        assert needed == {"on": True, "off": False, "auto": not loopback}[keys]


async def test_tls(mesh: Mesh) -> None:
    """With a certificate the router speaks TLS; files that are none stop the start with a sentence."""
    cert, key = mesh.directory / "cert.pem", mesh.directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(cert)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    for bad in (("x", ""), ("", "x"), ("/nowhere", str(key)), (str(key), str(key))):
        with pytest.raises(ConfigError, match="SPILLWAY_TLS"):
            tls_context(RouterConfig(tls_cert=bad[0], tls_key=bad[1]))
    router = mesh.add_router("tls", "--tls-cert", str(cert), "--tls-key", str(key))
    url = await asyncio.to_thread(mesh.address, router, "https")
    trust = ssl.create_default_context(cafile=str(cert))
    async with aiohttp.ClientSession(url) as session, session.get("/livez", ssl=trust) as response:
        assert response.status == 200
    assert await asyncio.to_thread(router.stop) == 0
