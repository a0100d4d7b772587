"""A service's process: signals, drain, exit status, and what its log must not hold."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
from common import lifecycle, log
from common.config import Common
from common.errors import ConfigError
log.setup("test", Common(log_format="json"))
logger = log.get("test")
async def main(stopping):
{body}
sys.exit(lifecycle.run(main, 0.2))
"""


def _start(body: str) -> subprocess.Popen[str]:
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=indented)], stderr=subprocess.PIPE, text=True
    )


def _end(body: str, *signals: int) -> tuple[int, str]:
    process = _start(body)
    assert process.stderr is not None
    said = ""
    for number in signals:
        said += process.stderr.readline()
        process.send_signal(number)
    said += process.stderr.read()
    process.stderr.close()
    return process.wait(60), said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(number: int) -> None:
    """SIGTERM and SIGINT let `main` finish; the status is 0."""
    status, said = _end("logger.info('up')\nawait stopping.wait()\nlogger.info('drained')", number)

    assert status == 0
    assert "drained" in said


def test_second_signal_ends_at_once() -> None:
    """A second signal does not wait for the drain."""
    body = "logger.info('up')\nawait stopping.wait()\nawait asyncio.sleep(60)"

    status, said = _end(body, signal.SIGTERM, signal.SIGTERM)

    assert status == 128 + signal.SIGTERM
    assert "stopped_at_once" in said


def test_config_error_is_one_sentence() -> None:
    """ConfigError: its sentence, status 2, no trace."""
    assert _end("raise ConfigError('SPILLWAY_X is bad')") == (2, "spillway: SPILLWAY_X is bad\n")


def test_unexpected_error_is_logged() -> None:
    """Anything else: logged with its trace, status 1."""
    status, said = _end("raise RuntimeError('boom')")

    record = json.loads(said)
    assert status == 1
    assert record["event"] == "service_failed"
    assert "boom" in record["exception"]


def test_secrets_do_not_reach_the_log() -> None:
    """Keys and passwords are masked wherever they stand."""
    body = (
        "logger.info('x', url='redis://user:hunter2@host', authorization='Bearer abc')\n"
        "logger.info('key sk-sw-abc-topsecret was used')\n"
        "import logging\nlogging.getLogger('lib').warning('at redis://:hunter2@host')"
    )

    _, said = _end(body)

    assert len(said.splitlines()) == 3
    for secret in ("hunter2", "abc-topsecret", "Bearer"):
        assert secret not in said
