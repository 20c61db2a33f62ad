"""Colours, figures and number formats of all pages, light and dark."""

from __future__ import annotations

import html
import math
import time
from dataclasses import dataclass
from typing import Any

from bokeh.core.properties import value
from bokeh.models import (
    ColumnDataSource,
    CustomJSTickFormatter,
    DatetimeTickFormatter,
    Glyph,
    Legend,
    LegendItem,
)
from bokeh.plotting import figure

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True, slots=True)
class Theme:
    """One set of colours, as CSS has them."""

    name: str
    page: str
    card: str
    text: str
    muted: str
    line: str
    accent: str
    good: str
    bad: str
    prefill: str
    decode: str
    colocated: str
    transfer: str
    p50: str
    p90: str
    p99: str
    ramp: tuple[str, ...]
    """From an empty to a full KV pool."""

    def of_role(self, role: str) -> str:
        return {"PREFILL": self.prefill, "DECODE": self.decode}.get(role, self.colocated)


LIGHT = Theme(
    name="light", page="#f3f5f8", card="#ffffff", text="#1b2430", muted="#5d6b7e",
    line="#dfe4eb", accent="#1f6feb", good="#1a7f4b", bad="#c92a2a",
    prefill="#d9730d", decode="#2f6fd0", colocated="#7a4fc2", transfer="#168a7a",
    p50="#7aa7e8", p90="#2f6fd0", p99="#173d7a",
    ramp=("#eef2f7", "#cfe0f5", "#9fc3ec", "#6aa2e0", "#3f7fd0", "#2a5fae", "#d9730d", "#c92a2a"),
)  # fmt: skip
DARK = Theme(
    name="dark", page="#10141a", card="#1a2029", text="#e4e9f0", muted="#94a1b3",
    line="#2e3744", accent="#6ea8fe", good="#4cc38a", bad="#ff6b6b",
    prefill="#f2994a", decode="#6ea8fe", colocated="#b197fc", transfer="#4fd1c5",
    p50="#4a6d9e", p90="#6ea8fe", p99="#cfe0ff",
    ramp=("#232b36", "#26405f", "#2c5688", "#3a70b5", "#5590dc", "#7db3f5", "#f2994a", "#ff6b6b"),
)  # fmt: skip
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}

_SECONDS = CustomJSTickFormatter(
    code="return tick < 1 ? +(tick * 1000).toPrecision(3) + ' ms' : +tick.toPrecision(3) + ' s'"
)


def new_figure(theme: Theme, height: int = 240, seconds_axis: bool = False, **given: Any) -> figure:
    """An empty figure that fills its card; nothing to scroll by accident, no logo."""
    chart = figure(
        height=height,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        background_fill_color=theme.card,
        border_fill_color=theme.card,
        outline_line_color=None,
        min_border_right=14,
        min_border_top=8,
        output_backend="canvas",
        **given,
    )
    chart.axis.axis_line_color = theme.line
    chart.axis.major_tick_line_color = theme.line
    chart.axis.minor_tick_line_color = None
    chart.axis.major_label_text_color = theme.muted
    chart.axis.axis_label_text_color = theme.muted
    chart.axis.major_label_text_font = chart.axis.axis_label_text_font = FONT
    chart.axis.major_label_text_font_size = chart.axis.axis_label_text_font_size = "12px"
    chart.axis.axis_label_text_font_style = "normal"
    chart.grid.grid_line_color = theme.line
    chart.xgrid.grid_line_color = None
    if seconds_axis:
        chart.yaxis.formatter = _SECONDS.clone()
    if given.get("x_axis_type") == "datetime":
        chart.xaxis.formatter = DatetimeTickFormatter(
            seconds="%H:%M:%S", minsec="%H:%M:%S", minutes="%H:%M", hourmin="%H:%M", hours="%H:%M"
        )
        chart.xaxis.ticker.desired_num_ticks = 5
    return chart


_LEGEND = {
    "orientation": "horizontal", "border_line_color": None, "background_fill_alpha": 0,
    "label_text_font": FONT, "label_text_font_size": "12px", "padding": 0, "margin": 0,
    "spacing": 14, "label_standoff": 5, "glyph_width": 18, "glyph_height": 14,
    "click_policy": "hide",
}  # fmt: skip


def style_legend(chart: figure, theme: Theme) -> None:
    """One row above the chart, so that it covers nothing."""
    for legend in chart.legend:
        chart.add_layout(legend, "above")
        legend.update(**_LEGEND, label_text_color=theme.text)


def add_legend(chart: figure, theme: Theme) -> None:
    """An empty one, for `add_glyph`."""
    chart.add_layout(Legend(**_LEGEND, label_text_color=theme.text), "above")


def add_glyph(chart: figure, source: ColumnDataSource, glyph: Glyph, label: str = "") -> None:
    """As ``chart.line`` and the like, but without three more glyphs for what is selected.

    Nothing can be selected on a page that has many charts, and every model takes its time.
    """
    renderer = chart.add_glyph(source, glyph)
    if label:
        chart.legend[0].items.append(LegendItem(label=value(label), renderers=[renderer]))


def buttons_css(theme: Theme) -> str:
    """Of a row of buttons, one of which is pressed."""
    return f"""
    .bk-btn {{ background: {theme.card} !important; color: {theme.muted} !important;
               border: 1px solid {theme.line} !important; box-shadow: none !important; }}
    .bk-btn.bk-active {{ background: {theme.accent} !important; color: {theme.card} !important; }}
    """


def local_ms(at: float) -> float:
    """Seconds since 1970 as a time axis wants them: milliseconds, on this machine's wall clock."""
    return (at + time.localtime(at).tm_gmtoff) * 1000.0


def clock_text(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def number_text(value: float | None, digits: int = 3) -> str:
    """``-`` for no data; thousands with commas."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(places, 4)}f}"


def seconds_text(value_s: float | None) -> str:
    if value_s is None or not math.isfinite(value_s):
        return "–"
    if value_s < 1:
        return f"{number_text(value_s * 1000)} ms"
    if value_s < 120:
        return f"{number_text(value_s)} s"
    minutes, seconds = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def percent_text(share: float | None, places: int = 1) -> str:
    return "–" if share is None or not math.isfinite(share) else f"{share:.{places}%}"


def dollars_text(value: float | None) -> str:
    return "–" if value is None else f"${value:,.2f}" if value >= 0.1 else f"${number_text(value)}"


def escape(text: object) -> str:
    """What users and workers write, made harmless in HTML."""
    return html.escape(str(text), quote=True)
