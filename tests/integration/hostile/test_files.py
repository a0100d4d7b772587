"""Every reader of files, given files nobody meant for it: one sentence that names the file, and no harm."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import report
from cli import main as cli
from common.config import RouterConfig
from common.errors import ConfigError
from engine.models.encoders.files import find
from loadgen import command
from services.router.service import tls_context
from tests.support.hostile.spoil import spoil
from tests.support.hostile.world import Witness, World

ROOT = Path(__file__).resolve().parents[3]


def _one_sentence(said: str, *names: str) -> None:
    assert "Traceback" not in said
    assert said.strip()
    assert said.strip().count("\n") == 0, said
    assert len(said) < 2000
    assert not names or any(name in said for name in names), said


# -- models


def _model(directory: Path) -> Path:
    """Write a small model by hand."""
    import torch
    from safetensors.torch import save_file

    from engine.models.encoders.weights import wanted

    shutil.copy(find("").directory / "tokenizer.json", directory / "tokenizer.json")
    config = {
        "model_type": "bert", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2,
        "intermediate_size": 8, "vocab_size": 30_522, "max_position_embeddings": 16, "type_vocab_size": 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    save_file({}, directory / "model.safetensors")
    weights = {name: torch.ones(shape) for name, shape in wanted(find(str(directory)).spec)}
    save_file(weights, directory / "model.safetensors")
    return directory


def _load(directory: Path) -> None:
    from engine.models.encoders.weights import load_weights

    files = find(str(directory))
    load_weights(files)
    files.tokenizer_json()


MODEL_FILES = ("config.json", "tokenizer.json", "model.safetensors", "modules.json")


@pytest.mark.parametrize("name", [*MODEL_FILES, "model.safetensors.index.json"])
def test_model_files(name: str, tmp_path: Path) -> None:
    """A model with any one file spoilt is refused by the file's name; never read without end."""
    directory = _model(tmp_path)
    _load(directory)
    for what in spoil(directory / name):
        if what in {"nothing", "a link to itself"} and name.startswith(
            ("modules", "model.safetensors.index")
        ):
            continue  # optional
        if name == "modules.json" and what in {"a list", "null", "a dict of nothing"}:
            continue  # says nothing about modules
        with pytest.raises(ConfigError) as caught:
            _load(directory)
        _one_sentence(str(caught.value), name.partition(".")[0])


def test_weights_that_lie(tmp_path: Path) -> None:
    """Headers that are huge, overlap, or point outside, and weights that are no numbers, are refused."""
    import torch
    from safetensors.torch import load_file, save_file

    path = _model(tmp_path) / "model.safetensors"
    good = path.read_bytes()
    (size,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + size])
    first = next(name for name in header if name != "__metadata__")
    lying = {**header, first: {**header[first], "data_offsets": [0, 1 << 40]}}
    encoded = json.dumps(lying).encode()
    for raw in (
        struct.pack("<Q", 1 << 63) + good[8:], struct.pack("<Q", 1 << 30) + good[8:], good[: len(good) // 2],
        struct.pack("<Q", len(encoded)) + encoded + good[8 + size :], good[:8] + b"\xff" * size,
    ):  # fmt: skip
        path.write_bytes(raw)
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            _load(tmp_path)
    path.write_bytes(good)
    weights = load_file(path)
    weights[first] = torch.full_like(weights[first], float("nan"))
    save_file(weights, path)
    with pytest.raises(ConfigError, match="holds NaN or infinity"):
        _load(tmp_path)


def test_missing_model_ends_a_worker(tmp_path: Path) -> None:
    """A worker told of a model that is not there ends with status 2 and one sentence, before anything else."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SPILLWAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "services.gpu_worker", "--data-dir", str(tmp_path), "--device", "cpu",
         "--embed-model", "/no/such/model"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    _one_sentence(done.stderr.splitlines()[-1], "/no/such/model")
    assert "Traceback" not in done.stderr


# -- certificates


def _certificate(directory: Path, name: str, *more: str) -> tuple[Path, Path]:
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    subprocess.run(
        [*words, "-keyout", str(key), "-out", str(cert), *(more or ("-nodes",))],
        check=True,
        capture_output=True,
    )
    return cert, key


def test_certificates(tmp_path: Path) -> None:
    """Certificates and keys that cannot be used are refused by name; a locked key does not ask on the terminal."""
    cert, key = _certificate(tmp_path, "one")
    _, other = _certificate(tmp_path, "two")
    _, locked = _certificate(tmp_path, "three", "-passout", "pass:secret")
    assert isinstance(
        tls_context(RouterConfig(tls_cert=str(cert), tls_key=str(key))), ssl.SSLContext
    )
    pairs = [(cert, other), (key, cert), (cert, locked), (cert, cert), (tmp_path, key)]
    for what in spoil(tmp_path / "bad"):
        del what
        pairs += [(tmp_path / "bad", key), (cert, tmp_path / "bad")]
        for one, two in pairs:
            with pytest.raises(ConfigError) as caught:
                tls_context(RouterConfig(tls_cert=str(one), tls_key=str(two)))
            _one_sentence(str(caught.value), str(one), str(two))
        pairs = []
    for half in (RouterConfig(tls_cert=str(cert)), RouterConfig(tls_key=str(key))):
        with pytest.raises(ConfigError, match="both or neither"):
            tls_context(half)


# -- the data directory


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPILLWAY_")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    "name", ["lock", "run/supervisor.json", "run/router-0.json", "redis.sock", "run", "redis"]
)
def test_data_directory(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever lies where notes, lock and socket belong, commands say that nothing runs there, and end."""
    data = tmp_path / "data"
    (data / "run").mkdir(parents=True)
    commands = [["status"], ["down"], ["search", "docs", "x"], ["ingest", "docs", str(tmp_path)]]
    commands += [["models"], ["reembed", "docs"]]
    if name in {"run", "redis"}:
        shutil.rmtree(data / "run")
    for what in spoil(data / name):
        for words in commands:
            status = cli.main([*words, "--data-dir", str(data)])
            said = capsys.readouterr()
            assert status in {1, 2, 3} or (status, words) == (0, ["down"]), (what, words, said)
            _one_sentence(said.err or said.out)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    "where", ["file", "file/below", "loop", "/proc/nowhere", "x" * 300, "/dev/null"]
)
def test_data_directory_that_is_none(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`up` on what cannot be a data directory ends with status 2 and one sentence, and starts nothing."""
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")

    assert cli.main(["up", "--data-dir", str(tmp_path / where)]) == 2
    _one_sentence(capsys.readouterr().err, "expected")


# -- load, traces and results


def test_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace that is none ends the load with status 2 and a sentence that names file and line."""
    path = tmp_path / "trace.jsonl"
    words = [
        "--url",
        "http://127.0.0.1:9",
        "--seconds",
        "0.1",
        "--arrivals",
        "trace",
        "--trace",
        str(path),
    ]
    for what in spoil(path):
        assert command.main(words) == 2, what
        _one_sentence(capsys.readouterr().err, "trace.jsonl")
    path.write_text('{"timestamp": 2.0}\n{"timestamp": 1.0}\n')
    assert command.main(words) == 2
    _one_sentence(capsys.readouterr().err, "line 2")


def test_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan's input that is none ends the command with status 2 and a sentence; an empty object lacks the times."""
    path = tmp_path / "plan.json"
    for what in spoil(path):
        assert cli.main(["plan", "retrieval", "--units", "4", "--file", str(path)]) == 2, what
        expected = "--inference is missing" if what == "a dict of nothing" else "plan.json"
        _one_sentence(capsys.readouterr().err, expected)


def test_schemas_and_inventories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A schema or an inventory that is none, aliases that would grow without end among them, is named in a sentence."""
    files = {name: tmp_path / f"{name}.yaml" for name in ("schema", "inventory", "running")}
    good = {
        "schema": "stages: {prefix: {params: 1e9, tokens: 8}, decode: {params: 1e9, tokens: 8}}",
        "inventory": "{chips: 2, hosts: 1, chip: XPU-A}",
    }
    bomb = "a: &a [1]\nb: &b [*a, *a]\nc: &c [*b, *b]\nstages: {prefix: *c, decode: *c}\n"
    for name, path in files.items():
        for other, text in good.items():
            files[other].write_text(text)
        asked = {**dict.fromkeys(good), name: None}
        words = [word for each in asked for word in (f"--{each}", str(files[each]))]
        for what in spoil(path):
            assert cli.main(["plan", "deployment", *words]) == 2, what
            _one_sentence(capsys.readouterr().err, path.name)
        if name != "running":
            path.write_text(bomb)
            assert cli.main(["plan", "deployment", *words]) == 2
            _one_sentence(capsys.readouterr().err, path.name)


def test_results(tmp_path: Path) -> None:
    """A result file that is none is named when the tables are made from it."""
    page = "<!-- bench:E1 -->\nold\n<!-- /bench:E1 -->"
    for what in spoil(tmp_path / "E1.json"):
        if what in {"nothing", "a link to itself"}:
            assert "Not measured" in report.rewrite(page, tmp_path)
            continue
        with pytest.raises(report.ReportError) as caught:
            report.rewrite(page, tmp_path)
        _one_sentence(str(caught.value), "E1.json")


# -- ingest


def test_ingest(tmp_path: Path, world: World, witness: Witness) -> None:
    """Bad files among good ones are reported by name; the good ones are in, and found."""
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "good.md").write_text("# Weirs\n\nA weir is a low dam across a river.")
    (folder / "sub" / "also.txt").write_text("Gates let water through.")
    (folder / "bad.md").write_bytes(b"caf\xe9 \xff")
    (folder / "large.md").write_bytes(b"x" * 2_000_000)
    (folder / "deep.json").write_bytes(b"[" * 100_000)
    (folder / "binary.md").write_bytes(bytes(range(256)) * 10)
    (folder / "wide.txt").write_text("a" * 900_000)
    (folder / "controls.txt").write_text("\x1b[31mred\x07 \u202e reversed \ufeff")
    (folder / os.fsdecode(b"name-\xff.md")).write_text("its name is no UTF-8")
    (folder / "new\nline.md").write_text("its name holds a line feed")
    (folder / ("n" * 250 + ".md")).write_text("its name is long")
    os.mkfifo(folder / "pipe.md")
    (folder / "loop.md").symlink_to("loop.md")
    (folder / "away.md").symlink_to("/etc/passwd")
    (folder / "device.md").symlink_to("/dev/zero")
    env = {k: v for k, v in os.environ.items() if not k.startswith("SPILLWAY_")}
    env |= {
        "SPILLWAY_URL": f"http://127.0.0.1:{world.port}",
        "SPILLWAY_API_KEY": world.keys["mallory"],
    }
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", "ingest", "bad", str(folder), "--patience", "20"],
        cwd=ROOT, env=env, capture_output=True, text=True, errors="surrogateescape", timeout=90, check=False,
    )  # fmt: skip

    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    for name in ("binary.md", "large.md", "UTF-8"):
        assert name in done.stderr
    stored: list[Any] = world.ask("GET", "/v1/collections/bad/documents?limit=1000").json["data"]
    # The encoding of bad.md is detected, as that of any text.
    assert {"good.md", "bad.md", "sub/also.txt"} <= {item["id"] for item in stored}
    assert not any("root:" in json.dumps(item) for item in stored)
    found = world.ask(
        "POST", "/v1/collections/bad/search", {"text": "Gates let water through.", "k": 1}
    )
    assert found.json["data"][0]["id"] == "sub/also.txt"
