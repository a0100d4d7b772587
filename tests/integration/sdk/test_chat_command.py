"""`spillway chat` and `spillway sessions` as people use them: arguments, pipes, a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import spillway_client as sw

from tests.integration.sdk.conftest import Command, TalkingMesh

ROOT = Path(__file__).resolve().parents[3]
SAID = re.compile(r"simulated [0-9a-f]{8}")


class Terminal:
    """A command that believes a person sits there."""

    def __init__(self, command: Command, *words: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execv(sys.executable, [sys.executable, "-m", "cli.main", *command.words(*words)])
        self.seen = ""

    def until(self, wanted: str, seconds: float = 30) -> str:
        """Read until something is shown; return all that was shown since the last time."""
        give_up = time.monotonic() + seconds
        while wanted not in self.seen:
            assert time.monotonic() < give_up, self.seen
            try:
                self.seen += os.read(self._fd, 4096).decode("utf-8", "replace")
            except OSError:
                assert wanted in self.seen, self.seen
        before, _, self.seen = self.seen.partition(wanted)
        return before + wanted

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def end(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)


def test_one_question(command: Command) -> None:
    """A prompt, or a text piped in, or both: one answer on stdout, the same for the same seed."""
    one = command.run("chat", "hello", "there", "--max-tokens", "19", "--seed", "1")
    piped = command.run("chat", "--max-tokens", "19", piped="hello there\n")
    both = command.run("chat", "about", "-", "--max-tokens", "19", piped="this text")

    for done in (one, piped, both):
        assert (done.returncode, done.stderr) == (0, "")
        assert SAID.search(done.stdout)
    assert one.stdout == piped.stdout != both.stdout


def test_an_answer_in_json(command: Command, tmp_path: Path) -> None:
    """A schema is read from a file and sent along; what is none, and a model that cannot, is told in a sentence."""
    schema = tmp_path / "place.json"
    schema.write_text('{"type": "object"}')
    unable = command.run("chat", "hello", "--schema", str(schema))
    assert (unable.returncode, "cannot bind an answer" in unable.stderr) == (1, True), unable.stderr
    schema.write_text("[]")
    for file in (str(schema), str(tmp_path / "none.json")):
        wrong = command.run("chat", "hello", "--schema", file)
        assert (wrong.returncode, "expected a file with a JSON Schema" in wrong.stderr) == (2, True)


def test_a_grounded_question(mesh: TalkingMesh, command: Command) -> None:
    """Under the answer stand the passages it rests on, with their text if asked for; nothing found is said."""
    with sw.Spillway(mesh.url) as client:
        client.collections.create("dams")
        text = "A spillway carries \x1b[31mwater past the dam."
        client.documents("dams").add([{"id": "dam/one", "text": text, "metadata": {"year": 1900}}])
    done = command.run("chat", "what?", "--collection", "dams", "--passages", "--max-tokens", "5")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[1\] dam/one:0-\d+ ", done.stdout)
    assert "A spillway carries" in done.stdout
    assert "\x1b" not in done.stdout

    wanted = ["--filter", '{"year": 2000}', "-k", "2"]
    none = command.run("chat", "what?", "--collection", "dams", *wanted)
    assert "No passage was found in collection 'dams'" in none.stdout

    words = ["--collection", "dams", "--mode", "text", "--diversity", "0.2", "--max-tokens", "5"]
    assert "dam/one" in command.run("chat", "the spillway", *words).stdout
    none = command.run("chat", "snow", *words)
    assert "No passage was found in collection 'dams'" in none.stdout


def test_a_session_from_the_shell(command: Command, tmp_path: Path) -> None:
    """A session is begun, gone on with, listed, shown, exported, imported and deleted by commands alone."""
    began = command.run(
        "chat", "one", "--session", "new", "--max-tokens", "4", "--system", "Be brief."
    )
    session = began.stderr.split()[-1]
    assert began.returncode == 0
    assert command.run("chat", "two", "--session", session, "--max-tokens", "4").returncode == 0

    assert session in command.run("sessions", "list").stdout
    shown = command.run("sessions", "show", session).stdout
    assert shown.index("system: Be brief.") < shown.index("user: one") < shown.index("user: two")
    assert shown.count("assistant: simu") == 2
    path = tmp_path / "session.json"
    assert command.run("sessions", "export", session, "-o", str(path)).returncode == 0
    copy = command.run("sessions", "import", str(path)).stdout.strip()
    assert command.run("sessions", "show", copy).stdout.count("assistant: simu") == 2
    assert "is deleted" in command.run("sessions", "delete", session).stdout
    proof = json.loads(command.run("sessions", "delete", copy, "--json").stdout)
    assert proof["proof"]["stores"]
    gone = command.run("chat", "three", "--session", session)
    assert gone.returncode == 1
    assert "session_not_found" in gone.stderr


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["chat"], 2, "nothing was asked"),
        (["chat", "x", "-k", "3"], 2, "need --collection"),
        (["chat", "x", "--mode", "text"], 2, "need --collection"),
        (["chat", "x", "--collection", "c", "--filter", "{"], 2, "expected a JSON object"),
        (["chat", "x", "--collection", "nowhere"], 1, "collection_not_found"),
        (["chat", "x", "--model", "nothing"], 1, "model_not_found"),
        (["chat", "x", "--max-tokens", "999999"], 1, "context"),
        (["sessions", "show", "nothing"], 1, "session_not_found"),
        (["sessions", "import", "/no/such/file"], 2, "No such file"),
    ],
)
def test_errors_are_sentences(command: Command, words: list[str], status: int, said: str) -> None:
    """What cannot be done is said in one sentence, with the status of its kind."""
    done = command.run(*words)

    assert done.returncode == status
    assert said in done.stderr
    assert done.stderr.startswith("spillway: ")
    assert "Traceback" not in done.stderr


def test_in_a_terminal(command: Command) -> None:
    """Answers come as they are made; Ctrl-C stops one and keeps the conversation, /new forgets it, /quit ends."""
    # More tokens than are made before the test stops the answer.
    terminal = Terminal(command, "chat", "--max-tokens", "8000")
    assert "sim-chat" in terminal.until("> ")
    terminal.type("tell me\n")
    terminal.until("simulated")
    os.kill(terminal.pid, signal.SIGINT)
    assert "(stopped)" in terminal.until("> ")
    terminal.type("/help\n")
    assert "/quit ends" in terminal.until("> ")
    terminal.type("/new\n")
    terminal.until("> ")
    terminal.type("/quit\n")
    assert terminal.end() == 0


def test_a_terminal_that_goes(command: Command) -> None:
    """End of input ends the conversation, as /quit does, and an error leaves it going."""
    terminal = Terminal(command, "chat", "--collection", "nowhere")
    terminal.until("> ")
    terminal.type("hello\n")
    assert "collection_not_found" in terminal.until("> ")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_models(command: Command) -> None:
    """`spillway models` tells generators by their context."""
    assert "sim-chat  kind generate  context 8192" in command.run("models").stdout
