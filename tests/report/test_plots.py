from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.report.figures import say
from draftsmith.report.plots import WIDTH, Axis, Bar, Series, axis, grouped_bars, histogram, interval_rows, line_chart
from tests.report.pages import HOSTILE, Element, parse

VALUES = st.lists(st.floats(-1e9, 1e9, allow_subnormal=False).map(lambda x: round(x, 4)), min_size=1, max_size=9)
POSITIVE = st.lists(st.floats(1e-4, 1e9), min_size=1, max_size=9)


def check_inside(chart: Element) -> None:
    """Everything is drawn inside the picture."""
    _, _, width, height = map(float, chart.attributes["viewbox"].split())
    for element in chart.all("circle", "text", "rect", "line"):
        for name, value in element.attributes.items():
            if name in ("x", "cx", "x1", "x2"):
                assert -0.1 <= float(value) <= width + 0.1
            if name in ("y", "cy", "y1", "y2"):
                assert -0.1 <= float(value) <= height + 0.1
            if name in ("width", "height"):
                assert float(value) >= 0
    for line in chart.all("polyline", "path"):
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", line.attributes.get("points") or line.attributes["d"])]
        assert all(-0.1 <= n <= max(width, height) + 0.1 for n in numbers)


def svg(markup: str) -> Element:
    (chart,) = parse(markup).all("svg")
    return chart


@settings(deadline=None)
@given(VALUES, st.booleans())
def test_an_axis_has_room_for_every_value_and_a_few_round_marks(values, from_zero):
    found = axis("x", values, from_zero=from_zero)
    assert all(-1e-6 <= found.place(value) <= 1 + 1e-6 for value in values)
    assert 2 <= len(found.ticks()) <= 8


@settings(deadline=None)
@given(POSITIVE)
def test_a_logarithmic_axis_has_room_for_every_value(values):
    found = axis("loss", values, log=True)
    assert all(0 < found.place(value) < 1 for value in values)
    assert all(found.low * 0.999 <= tick <= found.high * 1.001 for tick in found.ticks())
    assert found.place(found.low * math.sqrt(found.high / found.low)) == pytest.approx(0.5)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e6)), min_size=1, max_size=20))
def test_a_line_chart_stays_inside_its_picture(points):
    x = axis("step", [a for a, _ in points], from_zero=True)
    y = axis("loss", [b for _, b in points], from_zero=True)
    chart = svg(line_chart("title", x, y, [Series("one", "s0", points, marked=True)]))
    check_inside(chart)
    assert len(chart.all("circle")) == len(points)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_bars_and_their_intervals_stay_inside(rates):
    bars = [Bar("trained", rate, (rate / 2, (1 + rate) / 2)) for rate in rates]
    y = axis("accepted", [0, 1], from_zero=True)
    names = [str(k) for k in range(len(rates))]
    chart = svg(grouped_bars("title", "draft token", y, names, [bars, bars]))
    check_inside(chart)
    assert len(chart.all("rect")) == len(chart.all("path")) == 2 * len(rates)
    for bar, rate in zip(chart.all("rect")[::2], rates, strict=True):
        assert float(bar.attributes["height"]) == pytest.approx(rate * y_pixels(y), abs=0.1)


def y_pixels(y: Axis) -> float:
    """Height of the range 0 to 1."""
    full = svg(grouped_bars("", "", y, ["1"], [[Bar("", 1.0)]]))
    return float(full.all("rect")[0].attributes["height"])


def test_a_histogram_has_a_bar_a_bin_side_by_side():
    chart = svg(histogram("title", Axis("tokens", 0, 40), [3, 0, 7, 1], [0, 10, 20, 30, 40], "samples"))
    check_inside(chart)
    bars = [(float(bar.attributes["x"]), float(bar.attributes["width"])) for bar in chart.all("rect")]
    assert [title.text for title in chart.all("title")][2] == "20 to 30: 7 samples"
    assert all(x + width < after for (x, width), (after, _) in pairwise(bars))


def test_text_in_a_chart_is_escaped_and_long_names_are_cut_but_told_in_full():
    name = HOSTILE + "x" * 100
    rows = [(name, [Bar(HOSTILE, 1.5, (1.2, 1.8))]), ("plain", [Bar("trained", 2.0)])]
    chart = svg(interval_rows(HOSTILE, axis(HOSTILE, [1.0, 2.0]), rows))
    check_inside(chart)
    assert {element.tag for element in chart.all()} == {"line", "text", "circle", "title", "path"}
    assert chart.attributes["aria-label"] == HOSTILE
    assert chart.all("title")[0].text == f"{name}, {HOSTILE}: 1.5"
    assert max(len(text.text) for text in chart.all("text") if text.text != HOSTILE) * 7 < WIDTH


@pytest.mark.parametrize(
    ("value", "unit", "signed", "says"),
    [
        (0.04, "seconds", False, "0.0 s"),
        (59.94, "seconds", False, "59.9 s"),
        (59.96, "seconds", False, "1 min 00 s"),
        (3599.9, "seconds", False, "1 h 00 min"),
        (-90, "seconds", True, "−1 min 30 s"),
        (999, "bytes", False, "999 B"),
        (39_355_640, "bytes", False, "39.4 MB"),
        (2.5e12, "bytes", False, "2.5 TB"),
        (0.5103, "share", False, "51.0 %"),
        (0.021, "share", True, "+2.1 points"),
        (-0.0001, "length", True, "0.00"),
        (1234567, "count", False, "1,234,567"),
    ],
)
def test_numbers_are_said_with_their_unit(value, unit, signed, says):
    assert say(value, unit, signed) == says
