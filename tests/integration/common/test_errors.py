"""Error codes: each is defined once, raised with its own class only, and crosses the bus whole."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from common import errors
from common.bus import connection
from common.bus.scripts import CODES_WRITTEN
from common.errors import CODES, InternalError, InvalidRequest, SpillwayError, rebuild
from common.wire.message import decode, encode
from common.wire.results import Event, error_event
from services.router.admission.refusals import refusal
from services.router.responses.outcomes import error_of

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [
    path for part in ("common", "engine", "services", "cli") for path in (ROOT / part).rglob("*.py")
]
LUA = {path.name: path.read_text() for path in (ROOT / "common/bus/lua").glob("*.lua")}
REASONS = ("bus_full", "deadline", "depth", "no_worker", "tokens")
TURN_REASONS = ("session_busy", "session_changed", "session_not_found")
# What carries the code of an error that exists already, or of a stored one.
CARRIERS = {"Event", "DeadLetter", "rebuild", "debug", "info", "warning", "error", "exception"}


def _class(name: str) -> type[SpillwayError] | None:
    found = getattr(errors, name, None) or getattr(connection, name, None)
    return found if isinstance(found, type) and issubclass(found, SpillwayError) else None


def _calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield (where, name of what is called, call) of all sources."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                yield f"{path.relative_to(ROOT)}:{node.lineno}", name, node


def _texts(node: ast.expr) -> list[str]:
    """Return the constant strings that an expression can be; none if it is computed."""
    if isinstance(node, ast.IfExp):
        return _texts(node.body) + _texts(node.orelse)
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def _raised() -> list[tuple[str, str, str]]:
    """Return (where, class, code) of every error that is made with a code of its own."""
    return [
        (where, name, code)
        for where, name, call in _calls()
        for word in call.keywords
        if word.arg == "code" and name not in CARRIERS
        for code in _texts(word.value) or [f"<{ast.unparse(word.value)}>"]
    ]


def _charged() -> list[tuple[str, str]]:
    """Return (where, code) of every failure that a job is charged with."""
    at = {"fail": 1, "failure_of": 1, "EncodeFailure": 0, "StepFailure": 0}
    return [
        (where, code)
        for where, name, call in _calls()
        if name in at and len(call.args) > at[name] and ast.unparse(call.func) != "tracing.fail"
        for code in _texts(call.args[at[name]])
    ]


def test_a_code_has_one_class() -> None:
    """No two classes list the same code, and each lists the one it has when none is given."""
    listed = [code for cls in set(CODES.values()) for code in cls.codes]
    assert sorted(listed) == sorted(CODES)
    for cls in set(CODES.values()):
        assert CODES[cls.default_code] is cls


def test_every_code_in_the_sources_is_one_of_its_class() -> None:
    """Whatever a service raises is defined, with the class it is raised with."""
    raised = [found for found in _raised() if "refusals.py" not in found[0]]
    assert len(raised) > 80
    for where, name, code in raised:
        cls = _class(name)
        assert cls is not None, (where, name)
        assert code in CODES, (where, code)
        assert issubclass(cls, CODES[code]), (where, name, code)


def test_every_charge_in_the_sources_is_a_failure() -> None:
    """What a job is convicted of is a fault of the server's, and defined as one."""
    charged = _charged()
    assert {code for _, code in charged} >= {"model_error", "internal_error", "log_gap"}
    for where, code in charged:
        assert issubclass(CODES.get(code, SpillwayError), InternalError), (where, code)


@pytest.mark.parametrize("reason", [*REASONS, *TURN_REASONS])
def test_a_refusal_is_defined(reason: str) -> None:
    """Every reason for which a job is not admitted is a code, of the class that clients are answered with."""
    assert f"'{reason}'" in LUA["admit.lua"]
    error = refusal(reason, 1.0)
    assert (error.code, error.http_status) == (reason, CODES[reason].http_status)


def test_scripts_know_the_status_of_every_code_they_write() -> None:
    """What a script ends a job with has the status that common/errors.py gives to it."""
    ends = r"(?:end_job|bury)\(k, id,(?: '\w+', nil,)? '(\w+)'"
    written = {code for text in LUA.values() for code in re.findall(ends, text)}
    lost = re.search(r"local LOST = \{(.*?)\n\}", LUA["finish.lua"], re.DOTALL)
    assert lost is not None
    written -= {"session_"}
    written |= {f"session_{why}" for why in re.findall(r"(\w+) = '", lost[1])}

    assert written == set(CODES_WRITTEN)


def test_no_code_is_left_over() -> None:
    """A code that nothing raises any more is not listed either."""
    used = {code for _, _, code in _raised()} | {code for _, code in _charged()}
    used |= {cls.default_code for cls in CODES.values()}
    used |= {cls.default_code for cls in vars(connection).values() if hasattr(cls, "default_code")}
    assert set(CODES) - used - set(REASONS) - set(TURN_REASONS) - set(CODES_WRITTEN) == set()


@pytest.mark.parametrize("code", ["no_such_code", "not_found"])
def test_an_error_takes_no_code_of_another_class(code: str) -> None:
    """An error with an unknown code, or with another class', cannot be made."""
    with pytest.raises(ValueError, match="is no code of InvalidRequest"):
        InvalidRequest("m", code=code)


@pytest.mark.parametrize("code", sorted(set(CODES) - {"deadline_exceeded", "cancelled"}))
def test_an_error_crosses_the_bus_whole(code: str) -> None:
    """Class, status, code, sentence, field and wait are the same on both sides."""
    sent = CODES[code]("m", code=code, param="p", retry_after_s=2.5)
    got: SpillwayError = sent
    for index in range(2):  # a job's error is its workflow's, too
        got = error_of(decode(encode(error_event(index, "error", got)), Event))
    assert type(got) is type(sent)
    assert vars(got) == vars(sent)


@pytest.mark.parametrize(
    ("status", "answered", "retryable"),
    [(409, 409, False), (410, 410, False), (503, 503, True), (502, 502, False), (200, 500, False), (0, 500, False)],
)  # fmt: skip
def test_a_newer_version_is_believed_about_its_own_codes(
    status: int, answered: int, *, retryable: bool
) -> None:
    """An unknown code keeps the status it came with, if that is one of an error."""
    error = rebuild("of_tomorrow", "m", status=status, retry_after_s=3)
    assert (error.code, error.http_status, error.retryable) == ("of_tomorrow", answered, retryable)
    assert error.retry_after_s == 3


def test_a_known_code_keeps_the_status_that_is_documented() -> None:
    """Another version's idea of a code that this one defines does not change the answer."""
    assert rebuild("pin_over_budget", "m", status=418).http_status == 409


@pytest.mark.parametrize(
    ("code", "data", "status", "wait"),
    [
        ("disk_full", b'{"retry_after_s": 5.0}', 503, 5.0),
        ("pages_down", b"", 503, None),
        ("no_page_tier", b"", 409, None),
        ("behind", b"", 500, None),
    ],
)
def test_events_without_a_status_are_still_read(
    code: str, data: bytes, status: int, wait: float | None
) -> None:
    """A log that the version before wrote: its codes are looked up, its wait is in the data."""
    old: dict[str, Any] = {"v": 1, "index": 0, "kind": "error", "data": data}
    raw = msgspec.msgpack.encode(old | {"code": code, "message": "m"})
    error = error_of(decode(raw, Event))
    assert (error.code, error.http_status, error.retry_after_s) == (code, status, wait)


def test_the_documentation_lists_every_code() -> None:
    """The table of docs/api.md has each code once, beside its status."""
    text = (ROOT / "docs/api.md").read_text()
    rows = re.findall(r"^\| (\d{3}) \| ((?:`\w+`(?:, )?)+) \|$", text, re.MULTILINE)
    listed = [(code, int(status)) for status, row in rows for code in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted((code, cls.http_status) for code, cls in CODES.items())


NO_JOB = (
    "/v1/models", "/v1/requests", "/v1/responses/", "/v1/mesh", "/info", "/metrics", "/openapi.json",
    "/livez", "/readyz", "/health",
)  # fmt: skip


def test_routes_document_the_statuses_of_jobs() -> None:
    """A route that runs jobs documents every status a job's error can have; all of them have OpenAI's shape."""
    document = yaml.safe_load((ROOT / "docs/openapi.yaml").read_text())
    wanted = {str(cls.http_status) for cls in CODES.values()} - {"405"}  # a router's own
    for path, item in document["paths"].items():
        for verb, operation in item.items():
            if verb in {"get", "post", "put", "delete", "patch"} and not path.startswith(NO_JOB):
                if (verb, path) in {
                    ("get", "/v1/collections"),
                    ("delete", "/v1/collections/{name}"),
                    ("get", "/v1/collections/{name}/shards"),
                    ("get", "/v1/collections/{name}/tune"),
                    ("delete", "/v1/collections/{name}/tune"),
                }:
                    continue
                assert set(operation["responses"]) >= wanted, (verb, path)
    kinds = document["components"]["schemas"]["Error"]["properties"]["error"]["properties"]["type"]
    assert set(kinds["enum"]) == {cls.type for cls in CODES.values()}
