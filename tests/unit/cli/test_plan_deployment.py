"""`spillway plan deployment`: the front, the choice in words, the files, and what cannot be planned."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from cli import main
from planner.deployment import read_plan

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = """
name: long documents
stages:
  db_encode: {params: 120e6, tokens: 1000000, efficiency: 0.85}
  retrieval: {vectors: 10000, vector_bytes: 1536}
  prefix: {params: 70e9, tokens: 512}
  decode: {params: 70e9, tokens: 256, context: 512}
"""
INVENTORY = {"chip": "XPU-C", "chips": 128, "chips_per_host": 4, "hosts": 32}
MEASURED = {
    "resource": "core", "chips": 2, "hosts": 1, "decode": "with_prefix",
    "machine": {"cores": 2, "chips": 0, "memory_bytes": 8589934592, "product": "0.1.0"},
    "profile": [
        {"stage": name, "units": units, "batch": 1, "latency_s": seconds / units, "qps": rate * units}
        for name, seconds, rate in (("retrieval", 0.002, 500.0), ("prefix", 0.2, 5.0), ("decode", 0.03, 1.0))
        for units in (1, 2)
    ],
}  # fmt: skip
PRODUCT = "stages: {retrieval: {}, prefix: {tokens: 200}, decode: {tokens: 30}}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder, which is the working directory, with a schema and inventories."""
    (tmp_path / "rag.yaml").write_text(SCHEMA)
    (tmp_path / "xpu.json").write_text(json.dumps(INVENTORY))
    (tmp_path / "product.yaml").write_text(PRODUCT)
    (tmp_path / "here.json").write_text(json.dumps(MEASURED))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(*words: str, schema: str = "rag.yaml", inventory: str = "xpu.json") -> int:
    """Run the command."""
    return main.main(["plan", "deployment", "--schema", schema, "--inventory", inventory, *words])


@pytest.mark.usefixtures("place")
def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """The front, the cheapest schedule that reaches the goals, and in words what it is and what binds."""
    assert plan("--goal", "ttft_ms=500", "--goal", "qps=40", "--explain") == 0
    lines = capsys.readouterr().out.splitlines()

    assert lines[0] == (
        "long documents: db_encode, retrieval, prefix, decode; up to 128 chips, 32 hosts; "
        "times by the roofline model"
    )
    assert lines[2].split()[:3] == ["first", "token", "ms"]
    assert lines[2].split()[-2:] == ["chips", "placement"]
    assert any(line.endswith("db_encode+prefix:64 decode:8 retrieval:16") for line in lines)
    text = "\n".join(lines)
    assert "cheapest that reaches the goals, at 40 an hour:" in text
    assert "placement    db_encode and prefix share 32 chips" in text
    assert "             decode has 8 chips of its own" in text
    assert "41.44 requests/s: db_encode+prefix binds, which waits for retrieval" in text
    assert "the next is decode with 64.22" in text
    assert "levers on db_encode+prefix" in text
    assert "SPILLWAY_CHAT_DTYPE=int8" in text
    assert "a burst of 16, the largest batch" in text


@pytest.mark.usefixtures("place")
def test_goals_that_nothing_meets(capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest schedule, by what it misses each goal, and what binds there; status 1."""
    assert plan("--goal", "ttft_ms=5", "--goal", "tpot_ms=0.01", "--goal", "qps=400") == 1
    text = capsys.readouterr().out

    assert "no schedule has tokens as fast as asked" in text
    assert "nothing reaches the goals; the nearest" in text
    assert "missed       the first token: " in text
    assert "missed       the time between tokens: " in text
    assert "decode binds" in text
    assert plan("--goal", "qps=400") == 1
    text = capsys.readouterr().out
    assert "missed       requests/s: 104" in text
    assert "asked 400" in text


@pytest.mark.usefixtures("place")
def test_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON holds the whole front and the choice; prices move the choice; a lever of weights changes what is best."""
    assert plan("--json", "--most-batch", "decode=64") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["goals_reached"] is True
    assert found["chosen"] in found["front"]
    rates = [each["qps_per_chip"] for each in found["front"]]
    assert rates == sorted(rates)
    assert max(batch for each in found["front"] for batch in each["groups"][-1]["batches"]) <= 64

    assert plan("--json", "--lever", "int4", "--most-batch", "decode=64") == 0
    lighter = json.loads(capsys.readouterr().out)
    assert lighter["chosen"]["qps_per_chip"] >= found["chosen"]["qps_per_chip"]
    assert plan("--json", "--goal", "qps=1", "--price", "chip=0", "--price", "host=9") == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["hosts"] == 1


def test_a_recorded_load_is_a_goal(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rate of its busiest ten seconds chooses as the same rate given by hand does."""
    times = [*range(0, 100, 5), *(50 + 0.02 * n for n in range(400))]
    (place / "load.csv").write_text("timestamp\n" + "".join(f"{at:.2f}\n" for at in times))
    assert plan("--trace", "load.csv") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == (
        "load.csv: 420 requests in 95 s, 4.42 a second on average; 40.2 in the busiest 10 s, which is the goal"
    )
    assert plan("--trace", "load.csv", "--json") == 0
    recorded = json.loads(capsys.readouterr().out)
    assert plan("--goal", "qps=40.2", "--json") == 0
    assert recorded == json.loads(capsys.readouterr().out)


def test_files(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan for `up`, read back and marked as running in the next plot; a page holds picture and text."""
    product = {"schema": "product.yaml", "inventory": "here.json"}
    assert plan("--out", "plan.json", **product) == 0
    assert "times measured" in capsys.readouterr().out
    words = ("--out", "plan.json", "--compose", "compose.plan.yaml", "--kustomize", "overlay")
    assert plan(*words, **product) == 0
    assert "gpu_worker" in (place / "compose.plan.yaml").read_text()
    assert "kind: Kustomization" in (place / "overlay" / "kustomization.yaml").read_text()
    written = read_plan((place / "plan.json").read_bytes(), "plan.json")
    assert written.replicas("gpu_worker") == 1
    assert written.of_service("gpu_worker")[0].threads == 2
    capsys.readouterr()
    assert plan("--json", **product) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each.placement for each in written.front] == [
        each["placement"] for each in told["front"]
    ]
    assert [each.ttft_s for each in written.front] == [each["ttft_s"] for each in told["front"]]
    own = written.point()
    assert own is not None
    assert (own.chips, own.placement) == (told["chosen"]["chips"], told["chosen"]["placement"])

    assert plan("--plot", "front.svg", "--running", "plan.json", **product) == 0
    text = (place / "front.svg").read_text()
    ET.fromstring(text)
    assert ">running<" in text
    assert plan("--plot", "front.html", **product) == 0
    assert "<pre>pipeline: retrieval, prefix, decode; up to 2 cores" in (
        (place / "front.html").read_text()
    )


def test_the_example_of_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The schema, the inventory and the command of docs/planning.md print what stands there."""
    text = (ROOT / "docs" / "planning.md").read_text()
    schema, inventory = re.findall(r"```yaml\n(.*?)```", text, re.S)
    command, *shown = re.findall(
        r"```\n\$ (spillway plan deployment --schema.*?)\n```", text, re.S
    )[0].splitlines()
    (tmp_path / "rag.yaml").write_text(schema)
    (tmp_path / "gpus.yaml").write_text(inventory)
    monkeypatch.chdir(tmp_path)

    assert main.main(command.split()[1:]) == 0
    assert capsys.readouterr().out.splitlines()[: len(shown) - 1] == shown[:-1]
    assert shown[-1] == "..."


BAD = [
    (("--goal", "speed=1"), "--goal is 'speed=1': expected NAME=N, NAME one of ttft_ms, tpot_ms, qps"),
    (("--goal", "ttft_ms"), "--goal ttft_ms is '': expected a number from 1e-06"),
    (("--goal", "qps=-1"), "--goal qps is '-1': expected a number"),
    (("--price", "chip=much"), "--price chip is 'much': expected a number from 0"),
    (("--trace", "/nowhere.csv"), "/nowhere.csv: No such file or directory"),
    (("--trace", "rag.yaml"), "rag.yaml, line "),
    (("--trace", "rag.yaml", "--goal", "qps=1"), "--trace and --goal qps are given"),
    (("--most-batch", "guess=1"), "--most-batch is 'guess=1': expected NAME=N, NAME one of db_encode"),
    (("--most-batch", "prefix=0"), "--most-batch prefix is '0': expected a whole number from 1"),
    (("--lever", "magic"), "--lever is 'magic': expected one of int8, int4"),
    (("--plot", "front.png"), "--plot is 'front.png': expected a name that ends with .svg or .html"),
    (("--plot", "/nowhere/front.svg"), "/nowhere/front.svg: No such file or directory"),
    (("--running", "/nowhere.json"), "/nowhere.json: No such file or directory"),
    (("--running", "rag.yaml"), "rag.yaml: "),
    (("--out", "plan.json"), "the inventory names no machine"),
    (("--schema", "/dev/zero"), "/dev/zero is no regular file"),
    (("--schema", "xpu.json"), "xpu.json: Object contains unknown field `chip`"),
    (("--inventory", "rag.yaml"), "rag.yaml: Object contains unknown field `name`"),
    (("--inventory", "none.json"), "none.json: chips is 0"),
    (("--inventory", "small.json"), "small.json: nothing fits"),
    (("--schema", "circle.yaml"), "circle.yaml: stages have a cycle: prefix after decode after prefix"),
    (("--schema", "product.yaml"), "stages.retrieval.vectors is missing"),
    (("--inventory", "here.json"), "the inventory's profile has no point of db_encode"),
    (
        ("--schema", "product.yaml", "--inventory", "here.json", "--lever", "int8"),
        "here.json: its profile was measured without the lever",
    ),
    (("--compose", "c.yaml"), "--out is missing: expected it with --compose and --kustomize"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "sentence"), BAD)
def test_bad_input(
    words: tuple[str, ...], sentence: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence names the flag or the file, what is wrong and what is expected; status 2."""
    (place / "none.json").write_text(json.dumps({**INVENTORY, "chips": 0}))
    (place / "small.json").write_text(json.dumps({**INVENTORY, "chips": 1, "hosts": 1}))
    (place / "circle.yaml").write_text(SCHEMA.replace("prefix: {", "prefix: {after: decode, "))
    assert plan(*words) == 2
    said = capsys.readouterr().err

    assert said.startswith(f"spillway: {sentence}")
    assert "expected" in said
    assert said.count("\n") == 1
