"""A hub of models on this machine: as much of its protocol as `huggingface_hub` speaks to download."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(models: Mapping[str, Mapping[str, bytes]]) -> Iterator[str]:
    """Serve models (their files by name) until the end of the block; yields the hub's URL."""

    class Handler(BaseHTTPRequestHandler):
        """The routes that downloads use."""

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                model, rest = "/".join(parts[2:4]), parts[4:]
                files = models.get(model)
                if files is None:
                    return self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)
                entries = [
                    {
                        "type": "file",
                        "path": name,
                        "rfilename": name,
                        "size": len(data),
                        "oid": _tag(data),
                    }
                    for name, data in files.items()
                ]
                found: object = {"id": model, "sha": COMMIT, "siblings": entries}
                return self._send(
                    200, json.dumps(entries if "tree" in rest else found).encode(), {}, body
                )
            model, name = "/".join(parts[:2]), "/".join(parts[4:])
            data = models.get(model, {}).get(name)
            if data is None:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            return self._send(200, data, {"ETag": f'"{_tag(data)}"'}, body)

        def _send(self, status: int, data: bytes, headers: Mapping[str, str], body: bool) -> None:
            self.send_response(status)
            for name, value in {"X-Repo-Commit": COMMIT, **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _tag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
