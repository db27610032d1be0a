# SPDX-License-Identifier: Apache-2.0
"""SVG files with no library: cumulative distributions (which share of the values lies at or below x), and bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_PANEL_W, _PANEL_H, _LEFT, _TOP, _BOTTOM, _GAP = 380, 220, 50, 40, 40, 24
_MAX_POINTS = 400


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    values: Sequence[float]


def draw(title: str, panels: Sequence[Panel], columns: int = 2) -> str:
    rows = -(-len(panels) // columns)
    width, height = columns * (_PANEL_W + _GAP) + _GAP, 36 + rows * (_PANEL_H + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{_GAP}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for i, panel in enumerate(panels):
        x, y = _GAP + i % columns * (_PANEL_W + _GAP), 36 + i // columns * (_PANEL_H + _GAP)
        parts.append(f'<g transform="translate({x},{y})">{_panel(panel)}</g>')
    return "\n".join([*parts, "</svg>\n"])


_BAR_H, _BAR_GAP, _LABEL_W, _BAR_W = 18, 6, 190, 260


@dataclass(frozen=True, slots=True)
class Bars:
    title: str
    values: Sequence[tuple[str, float | None]]
    """(label, value); a bar without a value is named and left empty."""


def draw_bars(title: str, groups: Sequence[Bars]) -> str:
    """Groups side by side, each with its own scale."""
    width = len(groups) * (_LABEL_W + _BAR_W + 80) + _GAP
    height = 36 + _TOP + max((len(g.values) for g in groups), default=0) * (_BAR_H + _BAR_GAP) + _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{_GAP}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for i, group in enumerate(groups):
        parts.append(f'<g transform="translate({_GAP + i * (_LABEL_W + _BAR_W + 80)},36)">{_bars(group)}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _bars(group: Bars) -> str:
    high = max((v for _, v in group.values if v is not None), default=0) or 1.0
    parts = [f'<text x="{_LABEL_W}" y="{_TOP - 12}" font-size="13">{escape(group.title)}</text>']
    for i, (label, value) in enumerate(group.values):
        y = _TOP + i * (_BAR_H + _BAR_GAP)
        length = 0.0 if value is None else _BAR_W * value / high
        shown = "did not run" if value is None else f"{value:,.4g}"
        parts.append(f'<text x="{_LABEL_W - 6}" y="{y + 13}" text-anchor="end">{escape(label)}</text>')
        parts.append(f'<rect x="{_LABEL_W}" y="{y}" width="{length:.1f}" height="{_BAR_H}" fill="#06c"/>')
        parts.append(f'<text x="{_LABEL_W + length + 6:.1f}" y="{y + 13}" fill="#555">{shown}</text>')
    return "".join(parts)


def _panel(panel: Panel) -> str:
    plot_w, plot_h = _PANEL_W - _LEFT - 10, _PANEL_H - _TOP - _BOTTOM
    head = f'<text x="{_LEFT}" y="{_TOP - 12}" font-size="13">{escape(panel.title)} (n = {len(panel.values)})</text>'
    frame = f'<rect x="{_LEFT}" y="{_TOP}" width="{plot_w}" height="{plot_h}" fill="none" stroke="#999"/>'
    if not panel.values:
        return head + frame + f'<text x="{_LEFT + 10}" y="{_TOP + 20}" fill="#777">no values</text>'
    ordered = sorted(panel.values)
    high = ordered[-1] or 1.0

    def place(value: float, share: float) -> tuple[float, float]:
        return _LEFT + plot_w * value / high, _TOP + plot_h * (1 - share)

    step = max(1, len(ordered) // _MAX_POINTS)
    points = [place(ordered[0], 0.0)]
    points += [place(v, (i + 1) / len(ordered)) for i, v in enumerate(ordered) if i % step == 0 or i == len(ordered) - 1]
    curve = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = []
    for share in (0.5, 0.9, 0.99):
        _, y = place(0, share)
        marks.append(f'<line x1="{_LEFT}" x2="{_LEFT + plot_w}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">p{share * 100:g}</text>')
    for part in range(5):
        x = _LEFT + plot_w * part / 4
        marks.append(f'<text x="{x:.1f}" y="{_TOP + plot_h + 16}" text-anchor="middle" fill="#555">{high * part / 4:.4g}</text>')
    return head + "".join(marks) + frame + f'<polyline points="{curve}" fill="none" stroke="#06c" stroke-width="1.6"/>'
