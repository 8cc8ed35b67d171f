"""Plots as inline SVG: points over a logarithmic axis, and bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Told apart by everyone, also those who do not see all colours."""

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 15, 45

Points = Mapping[str, Sequence[tuple[float, float]]]


def scatter(
    points: Points,
    labels: tuple[str, str],
    *,
    names: Sequence[str] = (),
    limits: Sequence[tuple[float, float]] = (),
) -> str:
    """Points of several series; a value of 0 stands on the lowest line.

    Args:
        points: (x, y) by series, at least one point in all.
        labels: Of the axes x and y.
        names: Of the places 0, 1, ... on the x axis; left out, x is logarithmic too.
        limits: (x, y) points of a dashed line.
    """
    every = [p for series in points.values() for p in series] + list(limits)
    low, high = _decades([y for _, y in every])
    left, right = (-0.5, len(names) - 0.5) if names else _decades([x for x, _ in every])

    def place(x: float, y: float) -> tuple[float, float]:
        across = ((x if names else math.log10(x)) - left) / (right - left)
        up = ((math.log10(y) if y > 0 else low) - low) / (high - low)
        return (
            round(_LEFT + across * (_WIDTH - _LEFT - _RIGHT), 1),
            round(_HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM), 1),
        )

    parts = []
    for decade in range(low, high + 1):
        _, y = place(0 if names else 10**left, 10.0**decade)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">1e{decade}</text>')
    ticks = (
        enumerate(names)
        if names
        else ((10**d, f"{10**d}") for d in range(int(left), int(right) + 1))
    )
    for x, name in ticks:
        at, _ = place(x, 10.0**low)
        parts.append(f'<text x="{at}" y="{_HEIGHT - _BOTTOM + 16}" {_MIDDLE}>{escape(name)}</text>')
    if limits:
        line = " ".join(f"{x},{y}" for x, y in (place(*p) for p in sorted(limits)))
        parts.append(f'<polyline class="limit" points="{line}"/>')
    for colour, (series, values) in zip(COLOURS, points.items(), strict=False):
        for x, y in values:
            at, up = place(x, y)
            title = f"<title>{escape(series)}: {y:.2g}</title>"
            parts.append(f'<circle cx="{at}" cy="{up}" r="4" fill="{colour}">{title}</circle>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" {_MIDDLE}>{escape(labels[0])}</text>')
    turned = f'transform="translate(14 {(_HEIGHT - _BOTTOM + _TOP) / 2}) rotate(-90)"'
    parts.append(f"<text {turned} {_MIDDLE}>{escape(labels[1])}</text>")
    return _svg(_HEIGHT, f"{labels[1]} by {labels[0]}", parts) + _legend(list(points))


def bars(values: Mapping[str, float], label: str) -> str:
    """One bar a name, with its value after it."""
    most = max([*values.values(), 1])
    parts = []
    for number, (name, value) in enumerate(values.items()):
        y = 10 + number * 28
        width = round(value / most * (_WIDTH - 360), 1)
        parts.append(f'<text x="230" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="238" y="{y}" width="{width}" height="18" fill="{COLOURS[0]}"/>')
        parts.append(f'<text x="{244 + width}" y="{y + 14}">{value:,.0f} {escape(label)}</text>')
    return _svg(20 + 28 * len(values), label, parts)


_MIDDLE = 'text-anchor="middle"'


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Powers of ten around the positive values, at least one decade apart."""
    positive = [value for value in values if value > 0] or [1.0]
    low = math.floor(math.log10(min(positive)))
    return low, max(math.ceil(math.log10(max(positive))), low + 1)


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *parts, "</svg>"])


def _legend(series: Sequence[str]) -> str:
    items = (
        f'<span style="color:{colour}">&#9679;</span> {escape(name)}'
        for colour, name in zip(COLOURS, series, strict=False)
    )
    return f"<p>{' &nbsp; '.join(items)}</p>"
