"""A request's timeline as text: its stages in order, what overlaps, and its jobs where it has no stages."""

from __future__ import annotations

from spillway_client import RequestTimeline, StageRun

from cli.timeline import lines, overlap_ms


def job(stage: str, state: str, *times: float, index: int = 0) -> dict[str, object]:
    events = [{"what": what, "at": at} for what, at in zip(("admitted", "ended"), times)]  # noqa: B905
    return {"stage": stage, "index": index, "state": state, "events": events}


def test_stages_stand_on_one_axis() -> None:
    """Runs in the order in which they began; a second run is told as such, and so is what ran beside it."""
    stages = [
        StageRun("embed", 0, 100),
        StageRun("search", 600, 700, 1),
        StageRun("generate", 200, 1000),
        StageRun("search", 100, 200),
    ]
    told = RequestTimeline("request~0~x", 5.0, [job("request", "result", 1.0, 2.0)], stages)

    assert overlap_ms(stages) == 100
    assert list(lines(told)) == [
        "request~0~x: result, 1,000 ms, 100 ms of which several ran at once",
        "  embed                 0       100 ms  |====                                    |",
        "  search              100       100 ms  |    ====                                |",
        "  generate            200       800 ms  |        ================================|",
        "  search 2            600       100 ms  |                        ====            |",
    ]


def test_jobs_stand_for_stages() -> None:
    """Of a request that is no grounded answer; a job that runs ends now."""
    jobs = [
        job("request", "running", 1.0),
        job("part", "result", 1.0, 1.5),
        job("part", "running", 1.5, index=1),
    ]
    told = list(lines(RequestTimeline("request~0~x", 2.0, jobs)))

    assert told[0] == "request~0~x: running, 1,000 ms"
    assert [line.split("|")[0].split() for line in told[1:]] == [
        ["part", "0", "500", "ms"],
        ["part", "2", "500", "500", "ms"],
    ]
    assert list(lines(RequestTimeline("chat~0~x"))) == ["chat~0~x: unknown, 0 ms"]
