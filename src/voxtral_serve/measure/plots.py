"""The plots of a report, as inline SVG.

The plots are written without a plotting library, for these reasons: each kind of plot takes a few lines; colours and
fonts are the CSS variables of the page, so that one picture serves the light and the dark theme; a path of 10,000
points stays small; a plotting library would add 30 MB. Plots are element trees, which escape all text.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np

# In SVG units. A phone scales them by 0.85, a wide screen by 1.3.
WIDTH, HEIGHT = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 26, 44
# Of a plot with a row for each thing, whose names are on the left
ROWS_WIDTH, ROWS_LEFT, ROWS_RIGHT = 640, 150, 60
ROW, BAR = 30, 16
# Number of colours in the page's CSS. Further lines repeat the colours, dashed.
COLOURS = 8
MARKS = (50, 90, 95, 99)

Scale = Callable[[float], float]
Ticks = Sequence[tuple[float, str]]


def tag(name: str, /, *children: Element | str, **attributes: Any) -> Element:
    """An element. In attribute names, `class_` stands for class, and `stroke_width` for stroke-width."""
    given = {key.rstrip("_").replace("_", "-"): _short(value) for key, value in attributes.items()}
    element = Element(name, given)
    for child in children:
        if isinstance(child, Element):
            element.append(child)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + child
        else:
            element.text = (element.text or "") + child
    return element


def curves(lines: Mapping[str, Sequence[tuple[float, float]]]) -> Element:
    """Lines over seconds of audio."""
    every = [point for line in lines.values() for point in line]
    low, high = min(point[0] for point in every), max(point[0] for point in every)
    x, ticks = _from_zero(high, LEFT, WIDTH - RIGHT)
    if low > high / 2:  # aged sessions: the axis starts at their age
        x, ticks = _linear(low, high, LEFT, WIDTH - RIGHT), [(low, _label(round(low))), (high, _label(round(high)))]
    y, y_ticks = _from_zero(max(point[1] for point in every), HEIGHT - BOTTOM, TOP)
    picture = _frame(x, ticks, y, y_ticks, "seconds of audio", "ms")
    for number, line in enumerate(lines.values()):
        picture.append(_path([(x(age), y(max(0.0, lag))) for age, lag in line], number))
    return _with_legend(picture, list(lines))


def shares(values: Mapping[str, Sequence[float]]) -> Element:
    """The cumulative distribution of each load, on a logarithmic axis."""
    drawn = {load: np.maximum(each, 0.1) for load, each in values.items() if each}
    lowest, highest = (float(of([of(each) for each in drawn.values()])) for of in (min, max))
    x, x_ticks = _logarithmic(lowest, highest, LEFT, WIDTH - RIGHT)
    y = _linear(0, 1, HEIGHT - BOTTOM, TOP)
    picture = _frame(x, x_ticks, y, [(share, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 0.9, 1)], "ms", "")
    shares = np.linspace(0, 1, 201)
    for number, (load, each) in enumerate(drawn.items()):
        line = [(x(float(value)), y(share)) for value, share in zip(np.quantile(each, shares), shares, strict=True)]
        picture.append(_path(line, number))
        for mark in MARKS:
            value = float(np.percentile(each, mark))
            picture.append(_dot(x(value), y(mark / 100), number, f"{load}: P{mark} {value:.1f} ms"))
    return _with_legend(picture, list(drawn))


def scatter(points: Mapping[str, Sequence[tuple[float, float]]]) -> Element:
    """One dot per request. Each load is one path of zero-length lines; their round caps are the dots."""
    every = [point for each in points.values() for point in each]
    x, x_ticks = _from_zero(max(point[0] for point in every), LEFT, WIDTH - RIGHT)
    y, y_ticks = _from_zero(max(point[1] for point in every), HEIGHT - BOTTOM, TOP)
    picture = _frame(x, x_ticks, y, y_ticks, "seconds of audio", "ms")
    drawn = {load: each for load, each in points.items() if each}
    for number, each in enumerate(drawn.values()):
        dots = dict.fromkeys((_short(x(point[0])), _short(y(point[1]))) for point in each)
        path = "".join(f"M{left} {top}h0" for left, top in dots)
        picture.append(tag("path", d=path, class_=f"dots {_colour(number)}"))
    return _with_legend(picture, list(drawn))


def by_level(
    labels: Sequence[str],
    lines: Mapping[str, Sequence[float | None]],
    intervals: Mapping[str, Sequence[Sequence[float] | None]],
    x_unit: str,
    y_unit: str,
    bounds: Mapping[str, float] | None = None,
) -> Element:
    """Lines over levels of load. The levels are evenly spaced, because they usually grow by a factor.

    `bounds` are what a line must stay below, and dashed.
    """
    bounds = bounds or {}
    tops = [value for line in lines.values() for value in line if value is not None]
    tops += bounds.values()
    tops += [pair[1] for each in intervals.values() for pair in each if pair]
    x = _linear(-0.4, len(labels) - 0.6, LEFT, WIDTH - RIGHT)
    y, y_ticks = _from_zero(max(tops, default=1), HEIGHT - BOTTOM, TOP)
    picture = _frame(x, list(enumerate(labels)), y, y_ticks, x_unit, y_unit)
    for number, (name, line) in enumerate(lines.items()):
        known = [(place, value) for place, value in enumerate(line) if value is not None]
        picture.append(_path([(x(place), y(value)) for place, value in known], number))
        if name in bounds:
            bound = f"M{LEFT} {_short(y(bounds[name]))}H{WIDTH - RIGHT}"
            picture.append(tag("path", d=bound, class_=f"line dashed {_colour(number)}"))
        for place, value in known:
            pair = intervals[name][place] if name in intervals else None
            said = f"{name}, {x_unit} {labels[place]}: {_told(value)} {y_unit}"
            if pair:
                bar = f"M{_short(x(place))} {_short(y(pair[0]))}V{_short(y(pair[1]))}"
                picture.append(tag("path", d=bar, class_=f"line thin {_colour(number)}"))
                said += f" ({_told(pair[0])} to {_told(pair[1])})"
            picture.append(_dot(x(place), y(value), number, said))
    return _with_legend(picture, list(lines) if len(lines) > 1 else [])


def bars(groups: Sequence[dict[str, Any]]) -> Element:
    """A bar for the error rate of each group of clips, {"from_s", "to_s", "clips", "wer"}."""
    x = _linear(-0.5, len(groups) - 0.5, LEFT, WIDTH - RIGHT)
    y, y_ticks = _from_zero(100 * max(each["wer"] or 0 for each in groups), HEIGHT - BOTTOM, TOP)
    labels = [f"{each['from_s']}–{each['to_s']}" if each["to_s"] else f"{each['from_s']}+" for each in groups]
    picture = _frame(x, list(enumerate(labels)), y, y_ticks, "", "%")
    half = 0.35 * (x(1) - x(0))
    for place, each in enumerate(groups):
        clips = f"{each['clips']} clips" if len(groups) < 6 else str(each["clips"])
        picture.append(tag("text", clips, x=x(place), y=HEIGHT - BOTTOM + 30, class_="middle faint"))
        if each["wer"] is None:
            continue
        top = y(100 * each["wer"])
        size = {"x": x(place) - half, "y": top, "width": 2 * half, "height": HEIGHT - BOTTOM - top}
        picture.append(tag("rect", tag("title", f"{labels[place]} s: {each['wer']:.2%}"), class_="bar", rx=2, **size))
        picture.append(tag("text", f"{each['wer']:.1%}", x=x(place), y=top - 4, class_="middle"))
    return tag("div", picture)


def reliability(points: Sequence[tuple[float, int, int]]) -> Element:
    """The share of (mean probability, right, of how many) with its 95 % interval (Wilson 1927), and where it is
    equal to the probability, dashed."""
    x, y = _linear(0, 1, LEFT, WIDTH - RIGHT), _linear(0, 1, HEIGHT - BOTTOM, TOP)
    ticks = [(tenth / 5, f"{tenth / 5:g}") for tenth in range(6)]
    picture = _frame(x, ticks, y, ticks, "probability", "right")
    equal = f"M{_short(x(0))} {_short(y(0))}L{_short(x(1))} {_short(y(1))}"
    picture.append(tag("path", d=equal, class_="line dashed"))
    for probability, right, count in points:
        low, high = _wilson(right, count)
        bar = f"M{_short(x(probability))} {_short(y(low))}V{_short(y(high))}"
        picture.append(tag("path", d=bar, class_="line thin s0"))
        said = f"{right} of {count} words are right at a mean probability of {probability:.2f}"
        picture.append(_dot(x(probability), y(right / count), 0, said))
    return picture


# ---- Rows of bars


def ranges(rows: Sequence[tuple[str, float, float, float]]) -> Element:
    """A row for each (label, P50, P90, P99) in seconds: a bar from P50 to P99 with a mark at P90, on one log scale."""
    lowest, highest = (max(1e-4, of(value for row in rows for value in row[1:])) for of in (min, max))
    low = 10 ** math.floor(math.log10(lowest))
    high = max(10 ** math.ceil(math.log10(highest)), 10 * low)  # a scale has at least a factor of ten
    scale = _linear(math.log10(low), math.log10(high), ROWS_LEFT, ROWS_WIDTH - ROWS_RIGHT)
    height = ROW * len(rows) + 34
    picture = _rows(height, "P50 (thick mark), P90 (thin mark) and P99 (end) of each delay")
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        at = scale(float(power))
        picture.append(tag("path", d=f"M{_short(at)} 0V{height - 24}", class_="grid"))
        picture.append(tag("text", seconds(10.0**power), x=at, y=height - 6, class_="faint middle"))
    for number, (label, p50, p90, p99) in enumerate(rows):
        y = number * ROW + ROW / 2
        left, mark, right = (scale(math.log10(max(value, low))) for value in (p50, p90, p99))
        picture.append(tag("text", label, x=ROWS_LEFT - 10, y=y + 4, class_="end"))
        told = f"P50 {seconds(p50)}, P99 {seconds(p99)}"
        picture.append(_bar(left, y - BAR / 2, max(right - left, 3.0), BAR, "s0 soft", told))
        picture.append(_bar(left - 2, y - BAR / 2, 4.0, BAR, "s0", f"P50 {seconds(p50)}"))
        picture.append(_bar(mark - 1, y - BAR / 2, 2.0, BAR, "s0", f"P90 {seconds(p90)}"))
    return picture


def stacked(parts: Sequence[tuple[str, float]]) -> Element:
    """One bar of parts, each as long as its seconds."""
    total = sum(length for _, length in parts) or 1.0
    picture = _rows(34, ", ".join(f"{label} {seconds(length)}" for label, length in parts))
    at = 0.0
    for number, (label, length) in enumerate(parts):
        width = length / total * ROWS_WIDTH
        picture.append(_bar(at, 4, max(width - 2, 1.0), 26, f"s{number % 5}", f"{label}: {seconds(length)}"))
        if width > 46:
            picture.append(tag("text", seconds(length), x=at + width / 2, y=22, class_="middle on"))
        at += width
    return picture


def counts(rows: Sequence[tuple[str, int, int]]) -> Element:
    """A bar for each (label, count, of how many)."""
    picture = _rows(ROW * len(rows), ", ".join(f"{label} {count} of {of}" for label, count, of in rows))
    full = float(ROWS_WIDTH - ROWS_LEFT - ROWS_RIGHT)
    for number, (label, count, of) in enumerate(rows):
        top, middle = number * ROW + (ROW - BAR) / 2, number * ROW + ROW / 2 + 4
        picture.append(tag("text", label, x=ROWS_LEFT - 10, y=middle, class_="end"))
        picture.append(_bar(ROWS_LEFT, top, full, BAR, "rest", label))
        picture.append(_bar(ROWS_LEFT, top, full * count / max(of, 1), BAR, "s2", f"{count} of {of}"))
        picture.append(tag("text", f"{count}/{of}", x=ROWS_LEFT + full + 8, y=middle, class_="faint"))
    return picture


def seconds(value: float) -> str:
    """3.2 ms, 320 ms or 3.2 s."""
    if value >= 1:
        return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"
    return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.1f} ms"


def _rows(height: int, label: str) -> Element:
    return Element("svg", {"viewBox": f"0 0 {ROWS_WIDTH} {height}", "role": "img", "aria-label": label})


def _bar(x: float, y: float, width: float, height: float, kind: str, title: str) -> Element:
    return tag("rect", tag("title", title), class_=kind, x=x, y=y, width=width, height=height, rx=2)


# ---- Parts of a plot


def _frame(x: Scale, x_ticks: Ticks, y: Scale, y_ticks: Ticks, x_unit: str, y_unit: str) -> Element:
    picture = tag("svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")
    for value, label in y_ticks:
        line = f"M{LEFT} {_short(y(value))}H{WIDTH - RIGHT}"
        picture.append(tag("path", d=line, class_="grid"))
        picture.append(tag("text", label, x=LEFT - 6, y=y(value) + 4, class_="end"))
    picture.append(tag("path", d=f"M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}", class_="axis"))
    for value, label in x_ticks:
        picture.append(tag("text", label, x=x(value), y=HEIGHT - BOTTOM + 16, class_="middle"))
    picture.append(tag("text", x_unit, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 8, class_="middle faint"))
    if y_unit:
        picture.append(tag("text", y_unit, x=LEFT - 6, y=11, class_="end faint"))
    return picture


def _path(points: Sequence[tuple[float, float]], number: int) -> Element:
    path = "M" + "L".join(f"{_short(left)} {_short(top)}" for left, top in points) if points else ""
    return tag("path", d=path, class_=f"line {_colour(number)}")


def _dot(left: float, top: float, number: int, said: str) -> Element:
    return tag("circle", tag("title", said), cx=left, cy=top, r=3.2, class_=f"dot {_colour(number)}")


def _with_legend(picture: Element, names: Sequence[str]) -> Element:
    items = [tag("span", tag("i", class_=_colour(number)), name) for number, name in enumerate(names)]
    return tag("div", *([tag("p", *items, class_="legend")] if len(names) > 1 else []), picture)


def _colour(number: int) -> str:
    return f"s{number % COLOURS}" + (" dashed" if number >= COLOURS else "")


def _wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    middle, width = right + z * z / 2, z * math.sqrt(right * (count - right) / count + z * z / 4)
    return (middle - width) / (count + z * z), (middle + width) / (count + z * z)


# ---- Scales


def _linear(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _from_zero(highest: float, start: float, end: float) -> tuple[Scale, Ticks]:
    """A linear scale from 0 to just above the highest value, with four to six round ticks."""
    highest = highest if highest > 0 else 1
    step = next(step for step in _round_numbers(highest / 1000) if highest * 1.05 / step <= 6)
    top = math.ceil(highest * 1.05 / step) * step
    ticks = [(number * step, _label(number * step)) for number in range(round(top / step) + 1)]
    return _linear(0, top, start, end), ticks


def _logarithmic(lowest: float, highest: float, start: float, end: float) -> tuple[Scale, Ticks]:
    """A logarithmic scale with round ticks. A wider range has fewer ticks per power of ten."""
    low, high = lowest / 1.1, highest * 1.1
    scale = _linear(math.log10(low), math.log10(high), start, end)
    digits: Sequence[float] = (1, 2, 5)
    if high / low > 500:
        digits = (1,)
    elif high / low < 8:
        digits = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if high / low < 2.5 else (1, 1.5, 2, 3, 4, 6, 8)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [digit * 10.0**power for power in powers for digit in digits]
    ticks = [(value, _label(value)) for value in values if low <= value <= high]
    return lambda value: scale(math.log10(value)), ticks


def _label(value: float) -> str:
    return f"{value:,.6g}".replace(",", "\u202f")


def _told(value: float) -> str:
    """For the text of a dot: an RTF of 0.103 needs more than one digit."""
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _round_numbers(lowest: float) -> Any:
    power = math.floor(math.log10(lowest))
    while True:
        yield from (digit * 10.0**power for digit in (1, 2, 5))
        power += 1


def _short(value: Any) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
