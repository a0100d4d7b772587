"""Plot of a front as SVG: time to first token against requests/s a chip, the chosen and the running one marked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 72, 24, 40, 56


class FrontPoint(NamedTuple):
    """A point of the plot: milliseconds to the first token, requests/s of a chip, and what it says when pointed at."""

    ttft_ms: float
    qps_per_chip: float
    said: str = ""


class _Scale(NamedTuple):
    """A logarithmic axis from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> Iterator[float]:
        """Yield 1, 2 and 5 of every decade within the axis."""
        for decade in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1):
            for step in (1, 2, 5):
                if self.low <= (value := step * 10.0**decade) <= self.high:
                    yield value


def svg(
    points: Sequence[FrontPoint],
    title: str,
    *,
    chosen: FrontPoint | None = None,
    running: FrontPoint | None = None,
) -> str:
    """Return the picture; `points` by rising milliseconds, at least one."""
    marks = [*points, *(each for each in (chosen, running) if each)]
    across = _scale([each.ttft_ms for each in marks], LEFT, WIDTH - RIGHT)
    up = _scale([each.qps_per_chip for each in marks], HEIGHT - BOTTOM, TOP)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" font-family="sans-serif" font-size="12" role="img">'
        ),
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        *_axes(across, up),
        *_line(points, across, up),
        *(_dot(each, across, up, "#1f5fa8", 4) for each in points),
    ]
    if chosen:
        parts += _named(chosen, across, up, "#b3261e", "chosen")
    if running:
        parts += _named(running, across, up, "#2e7d32", "running")
    return "\n".join([*parts, "</svg>", ""])


def page(picture: str, title: str, lines: Sequence[str]) -> str:
    """Return an HTML page with the picture and the text that was printed beside it."""
    text = escape("\n".join(lines))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title></head>\n<body>\n{picture}<pre>{text}</pre>\n</body></html>\n"
    )


def _scale(values: Sequence[float], start: float, end: float) -> _Scale:
    return _Scale(min(values) / 1.25, max(values) * 1.25, start, end)


def _axes(across: _Scale, up: _Scale) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value in across.ticks():
        x = across.at(value)
        yield f'<path d="M{x} {TOP}V{bottom}" stroke="#ddd"/>'
        yield f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>'
    for value in up.ticks():
        y = up.at(value)
        yield f'<path d="M{LEFT} {y}H{right}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{value:g}</text>'
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{right}" stroke="#444" fill="none"/>'
    middle = (LEFT + right) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 16}" text-anchor="middle">time to first token, ms</text>'
    y = (TOP + bottom) / 2
    yield (
        f'<text x="18" y="{y}" text-anchor="middle" transform="rotate(-90 18 {y})">requests/s a chip</text>'
    )


def _line(points: Sequence[FrontPoint], across: _Scale, up: _Scale) -> Iterator[str]:
    """Yield the front as steps: a later first token allows what an earlier one gives, until the next point."""
    start, *rest = points
    path = f"M{across.at(start.ttft_ms)} {up.at(start.qps_per_chip)}"
    for each in rest:
        path += f"H{across.at(each.ttft_ms)}V{up.at(each.qps_per_chip)}"
    yield f'<path d="{path}" stroke="#1f5fa8" fill="none" stroke-width="1.5"/>'


def _dot(point: FrontPoint, across: _Scale, up: _Scale, color: str, radius: int) -> str:
    return (
        f'<circle cx="{across.at(point.ttft_ms)}" cy="{up.at(point.qps_per_chip)}" r="{radius}" '
        f'fill="{color}"><title>{escape(point.said)}</title></circle>'
    )


def _named(point: FrontPoint, across: _Scale, up: _Scale, color: str, name: str) -> Iterator[str]:
    x, y = across.at(point.ttft_ms), up.at(point.qps_per_chip)
    anchor, shift = ("end", -10) if x > WIDTH / 2 else ("start", 10)
    yield _dot(point, across, up, color, 7)
    yield f'<text x="{x + shift}" y="{y - 8}" text-anchor="{anchor}" fill="{color}">{name}</text>'
