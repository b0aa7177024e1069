"""Charts of the report as inline SVG, whose colours are the page's variables. Sizes in pixels."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from markupsafe import Markup, escape

WIDTH, LEFT, RIGHT = 640, 150, 60
ROW, BAR = 30, 16
HEIGHT, TOP, BOTTOM = 220, 14, 34  # of a chart of lines
FEWEST = 10  # a scale has at least a factor of ten


class Range(NamedTuple):
    """P50, P90 and P99 of a row, in seconds."""

    label: str
    p50: float
    p90: float
    p99: float


class Line(NamedTuple):
    """`values` are seconds, None where not measured; `bound` is drawn dashed."""

    label: str
    values: Sequence[float | None]
    bound: float | None = None


def seconds(value: float) -> str:
    """3.2 ms, 320 ms or 3.2 s."""
    if value >= 1:
        return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"
    return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.1f} ms"


def ranges(rows: Sequence[Range]) -> Markup:
    """A row for each: a bar from P50 to P99 with a mark at P90, on one logarithmic scale."""
    low = 10 ** math.floor(math.log10(max(1e-4, min(row.p50 for row in rows))))
    high = max(10 ** math.ceil(math.log10(max(1e-4, *(row.p99 for row in rows)))), low * FEWEST)

    def x(value: float) -> float:
        share = math.log(max(value, low) / low) / math.log(high / low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    height = ROW * len(rows) + BOTTOM
    parts = []
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        at = x(10.0**power)
        parts.append(
            _line(at, 0, at, height - 24, "grid") + _text(at, height - 6, seconds(10.0**power), "faint middle")
        )
    for number, row in enumerate(rows):
        y = number * ROW + ROW / 2
        parts.append(_text(LEFT - 10, y + 4, row.label, "end"))
        width = max(x(row.p99) - x(row.p50), 3)
        parts.append(
            _rect(x(row.p50), y - BAR / 2, width, BAR, "s0 soft", f"P50 {seconds(row.p50)}, P99 {seconds(row.p99)}")
        )
        parts.append(_rect(x(row.p50) - 2, y - BAR / 2, 4, BAR, "s0", f"P50 {seconds(row.p50)}"))
        parts.append(_rect(x(row.p90) - 1, y - BAR / 2, 2, BAR, "s0", f"P90 {seconds(row.p90)}"))
    return _svg(height, parts, "P50 (thick mark), P90 (thin mark) and P99 (end) of each delay")


def stacked(parts: Sequence[tuple[str, float]]) -> Markup:
    """One bar of parts, each as long as its seconds."""
    total = sum(each for _, each in parts) or 1.0
    drawn, at = [], 0.0
    for number, (label, each) in enumerate(parts):
        width = each / total * WIDTH
        drawn.append(_rect(at, 4, max(width - 2, 1), 26, f"s{number % 5}", f"{label}: {seconds(each)}"))
        if width > 46:
            drawn.append(_text(at + width / 2, 22, seconds(each), "middle on"))
        at += width
    return _svg(34, drawn, ", ".join(f"{label} {seconds(each)}" for label, each in parts))


def shares(rows: Sequence[tuple[str, int, int]]) -> Markup:
    """A bar for each (label, count, of how many)."""
    drawn = []
    for number, (label, count, of) in enumerate(rows):
        y, full = number * ROW, WIDTH - LEFT - RIGHT
        drawn.append(_text(LEFT - 10, y + ROW / 2 + 4, label, "end"))
        drawn.append(_rect(LEFT, y + (ROW - BAR) / 2, full, BAR, "rest", label))
        drawn.append(_rect(LEFT, y + (ROW - BAR) / 2, full * count / max(of, 1), BAR, "s2", f"{count} of {of}"))
        drawn.append(_text(LEFT + full + 8, y + ROW / 2 + 4, f"{count}/{of}", "faint"))
    return _svg(ROW * len(rows), drawn, ", ".join(f"{label} {count} of {of}" for label, count, of in rows))


def lines(ticks: Sequence[str], each: Sequence[Line]) -> Markup:
    """Lines over equally spaced ticks, on a logarithmic scale of seconds."""
    values = [value for line in each for value in (*line.values, line.bound) if value is not None and value > 0]
    low = 10 ** math.floor(math.log10(min(values)))
    high = max(10 ** math.ceil(math.log10(max(values))), low * FEWEST)
    left, right = 64, 20

    def x(number: int) -> float:
        return left + (number + 0.5) / len(ticks) * (WIDTH - left - right)

    def y(value: float) -> float:
        share = math.log(max(value, low) / low) / math.log(high / low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    drawn = []
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        at = y(10.0**power)
        drawn.append(
            _line(left, at, WIDTH - right, at, "grid") + _text(left - 8, at + 4, seconds(10.0**power), "faint end")
        )
    drawn += [_text(x(number), HEIGHT - 12, tick, "faint middle") for number, tick in enumerate(ticks)]
    for number, line in enumerate(each):
        points = [(x(place), y(value)) for place, value in enumerate(line.values) if value is not None]
        if line.bound is not None:
            drawn.append(_line(left, y(line.bound), WIDTH - right, y(line.bound), f"s{number} dashed"))
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        drawn.append(Markup('<polyline class="s{} line" points="{}"/>').format(number, path))
        drawn += [
            Markup('<circle class="s{} dot" cx="{:.1f}" cy="{:.1f}" r="4"><title>{}</title></circle>').format(
                number, x(place), y(value), f"{line.label}, {ticks[place]}: {seconds(value)}"
            )
            for place, value in enumerate(line.values)
            if value is not None
        ]
    return _svg(HEIGHT, drawn, ", ".join(line.label for line in each))


def _svg(height: float, parts: Sequence[Any], label: str) -> Markup:
    return Markup('<svg viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, height, label, Markup("").join(parts)
    )


def _rect(x: float, y: float, width: float, height: float, kind: str, title: str) -> Markup:
    return Markup(
        '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="2"><title>{}</title></rect>'
    ).format(kind, x, y, width, height, title)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(kind, x1, y1, x2, y2)


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(kind, x, y, escape(text))
