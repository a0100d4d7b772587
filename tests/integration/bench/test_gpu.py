"""The checks on an accelerator, rehearsed on the CPU: they measure, resume and keep their time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from bench.engine import exactness
from bench.gpu import chat, engine, falcon, mesh, neo, pensieve, shapes, windve
from bench.gpu.record import AGAIN
from bench.simulation.delayed_traversal import ExactVisited, traverse
from bench.workloads import walk_graph
from engine.decoder.executor.torch_executor import TorchExecutor
from services.vector_search.index.native_graph import kernel


def _run(path: Path, *more: str) -> int:
    return chat.main(["--device", "cpu", "--tiny", "--json", str(path), *more])


def test_rehearsal_fills_every_cell_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No minutes measure nothing; then every cell is there with its figures, and none is measured twice."""
    path = tmp_path / "chat.json"

    assert _run(path, "--minutes", "0") == AGAIN
    assert _run(path, "--minutes", "5") == 0
    found = json.loads(path.read_text())
    cells = found["cells"]
    assert {name.split("/")[0] for name in cells} == {"exact", "decode", "prefill", "agreement"}
    assert {name.split("/")[1] for name in cells if name.startswith("exact")} == set(
        exactness.FAMILIES
    )
    assert [len(cells[f"decode/tiny/{n}"]["first_s"][0]) for n in chat.STREAMS] == [1, 8, 32]
    assert found["date"]
    assert found["device"]

    def never(*_given: object, **_named: object) -> None:
        raise AssertionError("measured a second time")

    monkeypatch.setattr(exactness, "measure", never)
    monkeypatch.setattr(TorchExecutor, "load", never)
    assert _run(path) == 0


def test_engine_rehearsal_fills_every_cell(tmp_path: Path) -> None:
    """Peaks, attention that equals torch's, and decode beside the roofline; none is measured twice."""
    path = tmp_path / "engine.json"
    words = ["--device", "cpu", "--tiny", "--json", str(path)]

    assert engine.main([*words, "--minutes", "0"]) == AGAIN
    assert engine.main(words) == 0
    cells = json.loads(path.read_text())["cells"]
    assert {name.split("/")[0] for name in cells} == {"peak", "attention", "decode"}
    for name, cell in cells.items():
        if name.startswith("attention"):
            assert cell["worst"] < 1e-4
        if name.startswith("decode"):
            assert cell["share"] > 0
    before = path.read_text()
    assert engine.main(words) == 0
    assert path.read_text() == before


def test_pensieve_rehearsal_fills_every_cell(tmp_path: Path) -> None:
    """Warm turns by tier, copies by layer, and attention that equals torch's; none is measured twice."""
    path = tmp_path / "pensieve.json"
    words = ["--device", "cpu", "--tiny", "--json", str(path)]

    assert pensieve.main([*words, "--minutes", "0"]) == AGAIN
    assert pensieve.main(words) == 0
    cells = json.loads(path.read_text())["cells"]
    assert {name.split("/")[0] for name in cells} == {"warm", "overlap", "attention"}
    assert cells["attention"]["worst"] < 1e-4
    for name, cell in cells.items():
        if name.startswith("overlap"):
            assert cell["layers_come_s"] == sorted(cell["layers_come_s"])
    before = path.read_text()
    assert pensieve.main(words) == 0
    assert path.read_text() == before


def test_neo_rehearsal_serves_every_mode_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All modes give the tokens of the device alone, and say who attended and when; none is measured twice."""
    path = tmp_path / "neo.json"
    words = ["--device", "cpu", "--tiny", "--json", str(path)]

    assert neo.main([*words, "--minutes", "0"]) == AGAIN
    assert neo.main(words) == 0
    cells = json.loads(path.read_text())["cells"]
    assert {name.split("/")[0] for name in cells} == {"exact", "costs", "serve"}
    served = {name: cell for name, cell in cells.items() if name.startswith("serve")}
    assert len(served) == len(neo.cells(neo.TINY, neo.TINY.cores))
    for name, cell in served.items():
        assert cell["tokens_per_s"] > 0
        if not name.endswith(neo.ALONE):
            assert (
                cell["same_texts"] == cell["same_tokens"] == 1
            )  # a row's bits depend on nothing beside it
            assert cell["steps_in_stages"] > 0 or cell["host_share"] == 0
        if name.endswith(("simple", "full")):
            assert cell["host_share"] > 0.5
            assert any(line.startswith("host") for line in cell["timeline"])
    assert "128 tokens" in capsys.readouterr().out
    before = path.read_text()
    assert neo.main(words) == 0
    assert path.read_text() == before


def test_neo_timeline_is_drawn_to_scale() -> None:
    """Each side has its line; attention on the device has letters, and what is not busy is blank."""
    found = neo.draw(["before 0 1 0.0 1.0", "device 0 1 1.0 2.0", "host 1 1 1.0 4.0"])

    device, host = (line.split("|")[1] for line in found)
    quarter = neo.DRAWN // 4
    assert device == "0" * quarter + "a" * quarter + " " * 2 * quarter
    assert host == " " * quarter + "1" * 3 * quarter
    assert found[0].endswith("4.00 ms")


def test_mesh_rehearsal_asks_a_whole_instance(tmp_path: Path) -> None:
    """An instance is started once, answers everything over HTTP, finds its pages and its documents, and is ended."""
    path = tmp_path / "mesh.json"
    words = ["--device", "cpu", "--tiny", "--json", str(path)]

    assert mesh.main(words) == 0
    cells = json.loads(path.read_text())["cells"]
    assert cells["queries/16"]["cosine_of_equal_texts"] > 0.9999
    assert [len(cells[f"streams/{count}"]["first_s"]) for count in (1, 8)] == [1, 8]
    assert cells["turns"]["cached_tokens"][-1] > 0
    assert cells["search"]["stored"] == 200
    assert min(cells["search"]["best_scores"]) > 0.999
    assert mesh.main(words) == 0  # and starts nothing


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_no_device_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a CUDA device the answer is a sentence that names the rehearsal."""
    with pytest.raises(SystemExit):
        chat.main(["--json", str(tmp_path / "x.json")])

    assert "rehearse with --device cpu --tiny" in capsys.readouterr().err


def test_burst_counts_what_it_says(tmp_path: Path) -> None:
    """Every stream gets its tokens, in order, whatever the step's size; first tokens come before the last."""
    shapes.write(tmp_path / "m", shapes.SHAPES["tiny"], "cpu")
    runner = TorchExecutor.load(str(tmp_path / "m"), device="cpu", dtype="bf16", kv_bytes=1 << 22)
    burst = chat.Burst(runner, chat.prompts(runner, 3, 40, seed=1), 5, step_tokens=48)
    burst.run()

    assert [len(moments) for moments in burst.drawn_s] == [5, 5, 5]
    assert all(moments == sorted(moments) for moments in burst.drawn_s)
    assert burst.first_s[0] < burst.first_s[2]
    assert burst.decode_tokens_per_s > 0


def test_windve_rehearsal(tmp_path: Path) -> None:
    """Every cell of the tiny shape has both devices' lines and depths, and none is measured twice."""
    path = tmp_path / "windve.json"
    words = ["--device", "cpu", "--tiny", "--json", str(path)]

    assert windve.main([*words, "--minutes", "0"]) == AGAIN
    assert windve.main([*words, "--minutes", "5"]) == 0
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) >= 2
    for cell in cells.values():
        assert min(len(cell[name]["points"]) for name in ("accelerator", "cpu")) >= 3
        assert 0 <= cell["together"] <= windve.MOST
        # A busy machine answers not even one query in time: the depth is 0, and there is no gain.
        deep = cell["accelerator"]["tuned"]
        assert cell["gain"] == pytest.approx(cell["together"] / deep if deep else 0.0)
    before = path.stat().st_mtime_ns
    assert windve.main([*words, "--minutes", "5"]) == 0
    assert path.stat().st_mtime_ns == before


def test_falcon_rehearsal_walks_by_the_rule(tmp_path: Path) -> None:
    """Queries in step find and visit what each does by the rule in plain Python; every cell is filled once."""
    path = tmp_path / "falcon.json"
    words = ["--device", "cpu", "--tiny", "--json", str(path)]
    if kernel() is None:
        pytest.skip("no AVX2 or no compiler here")
    assert falcon.main([*words, "--minutes", "0"]) == AGAIN
    assert falcon.main(words) == 0
    cells = json.loads(path.read_text())["cells"]
    assert all(cell["recall"] >= 0.9 and cell["rounds"] > 0 for cell in cells.values())
    before = path.read_text()
    assert falcon.main(words) == 0
    assert path.read_text() == before

    drawn = walk_graph.deep_like(506, 3)
    graph, rows = walk_graph.build(drawn[:500], 1)
    links, entry = walk_graph.lowest(graph)
    vectors = torch.from_numpy(rows.view.matrix[:500])
    walks = falcon.StepWalks(vectors, torch.from_numpy(links), entry)

    def linked(node: int) -> list[int]:
        return [int(each) for each in links[node] if each >= 0]

    def distances(query: torch.Tensor, some: list[int]) -> list[float]:
        return [float(each) for each in -(vectors * query).sum(1)[some]]

    queries = torch.from_numpy(drawn[500:])
    for pair in ((1, 1), (1, 4), (4, 1), (6, 2)):
        nodes, visited, _ = walks.run(queries, 24, *pair)
        for number, query in enumerate(queries):
            walk = traverse(
                linked, partial(distances, query), entry,
                ef=24, groups=pair[0], candidates=pair[1], visited=ExactVisited(),
            )  # fmt: skip
            assert nodes[number].tolist() == [node for _, node in walk.found]
            assert int(visited[number]) == walk.visited
