"""Charts as inline SVG: no script, so that they are there in print, offline and at once.

Colours come from the page's style sheet, by class. Every piece of text goes through markupsafe, which escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 360, 230  # a phone's width, so that text is as large there as it is written here
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 26, 38
ROW = 46
LONGEST_NAME = 48
TINY = 1e-200  # what is smaller is nothing


@dataclass(frozen=True)
class Axis:
    """A range of values laid along an edge."""

    label: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values within the range, four or so."""
        if self.log:
            tens = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            marks = (1, 2, 5) if self.high > 30 * self.low else (1, 2, 3, 5, 7)
            found = [mark * 10.0**ten for ten in tens for mark in marks]
        else:
            step = round_step((self.high - self.low) / 4)
            found = [step * i for i in range(math.floor(self.low / step), math.ceil(self.high / step) + 1)]
        return [value for value in found if -1e-6 <= self.place(value) <= 1 + 1e-6]


def round_step(size: float) -> float:
    """The next of 1, 2, 5, 10, 20 … that is not smaller."""
    power = 10.0 ** math.floor(math.log10(size))
    return power * next(m for m in (1, 2, 5, 10) if m * power >= size * (1 - 1e-9))


def axis(label: str, values: Sequence[float], *, from_zero: bool = False, log: bool = False) -> Axis:
    """An axis on which all values find room, with round ends."""
    low, high = min(values), max(values)
    if log and low > TINY:
        return Axis(label, low / 1.1, high * 1.1, log=True)
    low = min(low, 0.0) if from_zero else low
    if high - low <= max(TINY, 1e-9 * max(abs(low), abs(high))):  # one value: room around it
        room = max(1.0, abs(low)) / 2
        low, high = low - (0 if from_zero else room), low + room
    step = round_step((high - low) / 4)
    return Axis(label, math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step)


@dataclass(frozen=True)
class Series:
    """Points of one colour, joined; with marks where each was measured on its own."""

    name: str
    colour: str  # classes of the style sheet: s0 … s7
    points: Sequence[tuple[float, float]]
    marked: bool = False


@dataclass(frozen=True)
class Bar:
    """A value with its 95 % interval, where that is known."""

    name: str
    value: float
    interval: tuple[float, float] | None = None


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> Markup:
    drawn = []
    for one in series:
        places = [(_across(x, a), _up(y, b), b) for a, b in one.points]
        if len(places) > 1:
            line = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in places)
            kind = "line marked" if one.marked else "line"
            drawn.append(Markup('<polyline class="{} {}" points="{}"/>').format(kind, one.colour, line))
        for (a, b, value), (at, _) in zip(places, one.points, strict=True) if one.marked else ():
            circle = '<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="3"><title>{}: {:.4g} at {:,g}</title></circle>'
            drawn.append(Markup(circle).format(one.colour, a, b, one.name, value, at))
    return _svg(title, HEIGHT, [_frame(x, y), *drawn])


def histogram(title: str, x: Axis, counts: Sequence[int], edges: Sequence[float], unit: str) -> Markup:
    """Bars of `counts[i]` over `edges[i]` to `edges[i + 1]`."""
    y = axis(unit, counts, from_zero=True)
    drawn = []
    for count, low, high in zip(counts, edges, edges[1:], strict=False):
        left, right = _across(x, low), _across(x, high)
        said = f"{low:,g} to {high:,g}: {count:,} {unit}"
        drawn.append(_bar("s0", left, max(right - left - 1, 1), _up(y, count), said))
    return _svg(title, HEIGHT, [_frame(x, y), *drawn])


def grouped_bars(title: str, x_label: str, y: Axis, names: Sequence[str], groups: Sequence[Sequence[Bar]]) -> Markup:
    """`groups[i]` are the bars of one colour, one for each of `names`."""
    room = (WIDTH - LEFT - RIGHT) / len(names)
    width = min(0.76 * room / len(groups), 34)
    drawn = []
    for i, name in enumerate(names):
        middle = LEFT + (i + 0.5) * room
        drawn.append(_text(middle, HEIGHT - BOTTOM + 15, name, "middle"))
        for g, group in enumerate(groups):
            left, said = middle + (g - len(groups) / 2) * width, f"{group[i].name}: {group[i].value:.4g}"
            drawn.append(_bar(f"s{g}", left + 1, width - 2, _up(y, group[i].value), said))
            if interval := group[i].interval:
                drawn.append(_whisker(left + width / 2, *(_up(y, end) for end in interval), upright=True))
    return _svg(title, HEIGHT, [_grid(y), _text(WIDTH - RIGHT, HEIGHT - 6, x_label, "end"), *drawn])


def interval_rows(title: str, x: Axis, rows: Sequence[tuple[str, Sequence[Bar]]]) -> Markup:
    """A row for each name, with a dot and its interval for each bar, one below the other."""
    height = TOP + len(rows) * ROW + BOTTOM
    drawn = []
    for tick in x.ticks():
        across = _across(x, tick, left=RIGHT)
        drawn.append(_rule(across, across, TOP - 8, height - BOTTOM))
        drawn.append(_text(across, height - BOTTOM + 15, _short(tick), "middle"))
    for i, (name, bars) in enumerate(rows):
        shown = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
        drawn.append(_text(RIGHT, TOP + i * ROW + 6, shown, "start", "ink"))
        for b, bar in enumerate(bars):
            middle = TOP + i * ROW + 18 + 11 * b
            if bar.interval:
                drawn.append(_whisker(middle, *(_across(x, end, left=RIGHT) for end in bar.interval), upright=False))
            dot = '<circle class="dot s{}" cx="{:.1f}" cy="{}" r="4"><title>{}</title></circle>'
            said = f"{name}, {bar.name}: {bar.value:.4g}"
            drawn.append(Markup(dot).format(b, _across(x, bar.value, left=RIGHT), middle, said))
    drawn.append(_text(WIDTH - RIGHT, height - 6, x.label, "end"))
    return _svg(title, height, drawn)


def _svg(title: str, height: int, parts: Sequence[Markup]) -> Markup:
    # With its size in attributes, the page has its layout before anything is drawn.
    start = '<svg role="img" aria-label="{0}" viewBox="0 0 {1} {2}" width="{1}" height="{2}">'
    return Markup(start).format(title, WIDTH, height) + Markup("").join(parts) + Markup("</svg>")


def _frame(x: Axis, y: Axis) -> Markup:
    """Grid, values along both edges, and what they are of."""
    marks = [_text(_across(x, tick), HEIGHT - BOTTOM + 15, _short(tick), "middle") for tick in x.ticks()]
    floor = _rule(LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM, HEIGHT - BOTTOM)
    return Markup("").join([_grid(y), floor, *marks, _text(WIDTH - RIGHT, HEIGHT - 6, x.label, "end")])


def _grid(y: Axis) -> Markup:
    parts = [_text(2, 12, y.label, "start")]
    for tick in y.ticks():
        up = _up(y, tick)
        parts += [_rule(LEFT, WIDTH - RIGHT, up, up), _text(LEFT - 5, up + 4, _short(tick), "end")]
    return Markup("").join(parts)


def _rule(x1: float, x2: float, y1: float, y2: float) -> Markup:
    line = '<line class="grid" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>'
    return Markup(line).format(x1, x2, y1, y2)


def _bar(colour: str, x: float, width: float, top: float, said: str) -> Markup:
    """From `top` down to the floor; `said` is shown to a pointer."""
    bar = '<rect class="bar {}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
    return Markup(bar).format(colour, x, top, width, HEIGHT - BOTTOM - top, said)


def _whisker(middle: float, low: float, high: float, *, upright: bool) -> Markup:
    """An interval as a line with ends; `middle` is where it stands across its own direction."""
    ends = [(middle, low, middle, high)] + [(middle - 4, at, middle + 4, at) for at in (low, high)]
    path = " ".join(
        f"M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}" if upright else f"M{b:.1f} {a:.1f}L{d:.1f} {c:.1f}" for a, b, c, d in ends
    )
    return Markup('<path class="whisker" d="{}"/>').format(path)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "muted") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, text)


def _across(x: Axis, value: float, left: float = LEFT) -> float:
    return left + x.place(value) * (WIDTH - RIGHT - left)


def _up(y: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - y.place(value) * (HEIGHT - TOP - BOTTOM)


def _short(value: float) -> str:
    for power, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power:
            return f"{value / power:g}{letter}"
    return f"{value:g}"
