"""The row of large numbers: each with what it means, its trend, and a sparkline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daskserve.dashboards.page import Html, html_pane
from daskserve.dashboards.theme import Theme, escape

_WIDTH, _HEIGHT = 120.0, 26.0
_STEADY = 0.02
"""A smaller change is called steady."""


@dataclass(frozen=True, slots=True)
class Number:
    """One number.

    Parameters
    ----------
    series
        Its values up to now, the last one shown; None where there was no data.
    note
        One line below.
    least
        Below it the number is red.
    """

    title: str
    unit: str
    series: Sequence[float | None]
    text: Callable[[float | None], str]
    note: str = ""
    least: float | None = None

    @property
    def value(self) -> float | None:
        return self.series[-1] if self.series else None

    @property
    def change(self) -> float | None:
        """Of the mean of the last tenth against all before it; None without enough data."""
        known = [v for v in self.series if v is not None]
        count = max(5, len(known) // 10)
        if len(known) < 3 * count:
            return None
        before, now = known[:-count], known[-count:]
        mean = sum(before) / len(before)
        return sum(now) / len(now) / mean - 1 if mean else None


def numbers_pane(theme: Theme) -> Html:
    return html_pane(theme, f"""
    .numbers {{ display: grid; gap: 14px; grid-template-columns: repeat(auto-fit,
                minmax(190px, 1fr)); }}
    .number {{ background: {theme.card}; border: 1px solid {theme.line}; border-radius: 10px;
               padding: 10px 14px; min-width: 0; }}
    .head {{ display: flex; justify-content: space-between; gap: 8px; color: {theme.muted};
             font-size: 13px; }}
    .value {{ font-size: 27px; font-weight: 650; line-height: 1.25; white-space: nowrap;
              font-variant-numeric: tabular-nums; }}
    .value small {{ font-size: 13px; font-weight: 400; color: {theme.muted}; margin-left: 6px; }}
    .note {{ color: {theme.muted}; font-size: 12.5px; min-height: 1.3em; overflow: hidden;
             text-overflow: ellipsis; white-space: nowrap; }}
    svg {{ display: block; width: 100%; height: {_HEIGHT:g}px; }}
    """)  # fmt: skip


def numbers_html(numbers: Sequence[Number], theme: Theme) -> str:
    return f'<div class="numbers">{"".join(_one(number, theme) for number in numbers)}</div>'


def _one(number: Number, theme: Theme) -> str:
    value = number.value
    is_bad = number.least is not None and value is not None and value < number.least
    return (
        f'<div class="number"><div class="head"><span>{escape(number.title)}</span>'
        f"<span>{_trend(number)}</span></div>"
        f'<div class="value{" bad" if is_bad else ""}">{escape(number.text(value))}'
        f"<small>{escape(number.unit)}</small></div>{_sparkline(number.series, theme)}"
        f'<div class="note" title="{escape(number.note)}">{escape(number.note)}</div></div>'
    )


def _trend(number: Number) -> str:
    change = number.change
    if change is None:
        return ""
    if abs(change) < _STEADY:
        return "steady"
    if abs(change) >= 10:
        return "▲ ×" + f"{change + 1:.0f}"
    return f"{'▲' if change > 0 else '▼'} {abs(change):.0%}"


def _sparkline(series: Sequence[float | None], theme: Theme) -> str:
    known = [v for v in series if v is not None and math.isfinite(v)]
    if len(known) < 2:
        return "<svg></svg>"
    low, high = min(known), max(known)
    span = (high - low) or abs(high) or 1.0
    low -= 0.0 if high > low else span / 2
    step = _WIDTH / max(len(series) - 1, 1)
    points = " ".join(
        f"{i * step:.1f},{_HEIGHT - 2 - (v - low) / span * (_HEIGHT - 4):.1f}"
        for i, v in enumerate(series)
        if v is not None and math.isfinite(v)
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none">'
        f'<polyline points="{points}" fill="none" stroke="{theme.accent}" stroke-width="1.5"'
        ' vector-effect="non-scaling-stroke"/></svg>'
    )
