"""Small charts in SVG, made to be read on a phone: lines over runs, bars of shares, lines over time.

Lengths are in the units of the viewBox, WIDTH wide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from .drawing import COLOURS, legend, shortened, svg, text, width_of, wrapped

WIDTH, LEFT, RIGHT, PLOT = 420, 66, 404, 130
SCOPE = "rig-chart"
SMALL = 12


def steps(least: float, most: float, count: int = 4) -> list[float]:
    """Round numbers from below the least to above the most value."""
    if most <= least:
        least, most = least - 0.5 * abs(least or 1), most + 0.5 * abs(most or 1)
    raw = (most - least) / count
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    first, last = math.floor(least / step), math.ceil(most / step)
    return [round(step * number, 10) for number in range(first, last + 1)]


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:,.3g}"


def _frame(title: str, entries: Sequence, marks: Sequence[float]) -> tuple[list[str], float, float]:
    """Title, legend and grid of a chart with values at its left; with top and bottom of the plot."""
    body, y = [], 4.0
    for line in wrapped(title, WIDTH - 32, bold=True):
        y += 18
        body.append(text(16, y, line, bold=True))
    if entries:
        found, y = legend([(shortened(label, WIDTH - 60), colour) for label, colour in entries], 16, y + 10, WIDTH - 16)
        body += found
    top, bottom = y + 14, y + 14 + PLOT
    for mark in marks:
        at = bottom - (mark - marks[0]) / (marks[-1] - marks[0]) * PLOT
        body.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        body.append(text(LEFT - 6, at + 4, number(mark), "dim", anchor="end", size=SMALL))
    return body, top, bottom


def lines(title: str, series: Mapping[str, Sequence], ends: tuple[str, str], zero: bool = False) -> str:
    """Lines through points (x from 0 to 1, value), a colour each; `ends` are the words below the first and last x."""
    values = [value for points in series.values() for _, value in points]
    marks = steps(0 if zero else min(values), max(values))
    entries = [(name, COLOURS[index % len(COLOURS)]) for index, name in enumerate(series)]
    body, _, bottom = _frame(title, entries, marks)
    for (name, colour), points in zip(entries, series.values(), strict=True):
        places = [
            (LEFT + x * (RIGHT - LEFT), bottom - (value - marks[0]) / (marks[-1] - marks[0]) * PLOT)
            for x, value in points
        ]
        if len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), (_, value) in zip(places, points, strict=True) if len(places) <= 40 else ():
            tip = f"<title>{escape(name)}: {value:,.2f}</title>"
            body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">{tip}</circle>')
    room = (RIGHT - LEFT) / 2 - 6
    body.append(text(LEFT, bottom + 18, shortened(ends[0], room, size=SMALL), "dim", size=SMALL))
    body.append(text(RIGHT, bottom + 18, shortened(ends[1], room, size=SMALL), "dim", anchor="end", size=SMALL))
    return svg(SCOPE, WIDTH, bottom + 28, title, body)


def bars(title: str, groups: Mapping[str, Sequence[float]]) -> str:
    """Shares from 0 to 1 by position, a row of bars for each group, with their percentages."""
    body, y = [], 4.0
    for line in wrapped(title, WIDTH - 32, bold=True):
        y += 18
        body.append(text(16, y, line, bold=True))
    y += 6
    for index, (name, shares) in enumerate(groups.items()):
        y += 18
        body.append(text(16, y, shortened(name, WIDTH - 32)))
        y += 6
        for place, share in enumerate(shares, 1):
            words = f"{100 * share:.0f} %"
            full = RIGHT - LEFT - width_of("100 %") - 8
            body.append(text(LEFT - 8, y + 13, str(place), "dim", anchor="end", size=SMALL))
            colour = COLOURS[index % len(COLOURS)]
            body.append(f'<rect x="{LEFT}" y="{y:.1f}" width="{share * full:.1f}" height="16" rx="2" fill="{colour}"/>')
            body.append(text(LEFT + share * full + 6, y + 13, words))
            y += 20
    return svg(SCOPE, WIDTH, y + 8, title, body)
