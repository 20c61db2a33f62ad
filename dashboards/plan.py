"""Plan: how attainment falls with the rate, how the ways rank, and what other rates would need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import panel as pn
from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, Span
from bokeh.plotting import figure

from daskserve.dashboards.feed import Feed
from daskserve.dashboards.page import Card, Page, empty_text, html_pane
from daskserve.dashboards.theme import (
    Theme,
    dollars_text,
    escape,
    new_figure,
    number_text,
    seconds_text,
    style_legend,
)
from daskserve.dashboards.ways import ways_css, ways_html
from daskserve.planner.plan_record import FrontPoint, PlanRecord, lightest

_NONE = (
    "No plan has been made yet. Ask for one on the What-if page: the refined answer appears here"
    " with its curves. daskserve dashboard --plan FILE shows what daskserve plan --report wrote."
)


_APART, _TOGETHER = "prefill, decode apart", "colocated"
_WAYS = (_APART, _TOGETHER)
_NO_CHART = "Nothing has been simulated yet."
_HEAD_CSS = """
.lead { font-size: 16px; margin: 0 0 6px; }
ul { margin: 6px 0 0 18px; padding: 0; line-height: 1.5; }
"""


class PlanPage(Page):
    """The last plan that was refined, by whatever session, or that was recorded."""

    title, path = "Plan", "plan"

    def __init__(self, feed: Feed, theme: Theme, **params: Any) -> None:
        super().__init__(feed, theme, **params)
        self._shown: PlanRecord | None = None
        self._head = html_pane(theme, _HEAD_CSS)
        self._ranking = html_pane(theme, ways_css(theme), empty_text(_NONE))
        self._curves = {way: ColumnDataSource({"rate": [], "share": []}) for way in _WAYS}
        self._front = {way: ColumnDataSource(_front_columns([], 1.0)) for way in _WAYS}
        self._best = ColumnDataSource({"rate": [], "gpus": []})
        self._chosen = ColumnDataSource({"rate": [], "gpus": []})
        self._target = Span(dimension="width", line_dash="dashed", line_color=theme.bad)
        self._rate = Span(dimension="height", line_dash="dashed", line_color=theme.muted)
        self._charts = [self._new_curves(), self._new_front()]
        self._no_chart = [html_pane(theme, text=empty_text(_NO_CHART)) for _ in self._charts]
        curves, front = (
            pn.Column(text, _pane(chart), sizing_mode="stretch_width", margin=0)
            for text, chart in zip(self._no_chart, self._charts, strict=True)
        )
        self.cards = [
            Card("Plan", self._head, "full"),
            Card("Ranking", self._ranking, "full", "P prefill, D decode, C colocated instances"),
            Card("Attainment against rate", curves, note="share within both limits,"
                 " simulated"),
            Card("GPUs, cost and rate", front, note="lightest instances by formula; area:"
                 " dollars per hour"),
        ]  # fmt: skip
        self.update()

    def update(self) -> None:
        plan = self.feed.plan
        if plan is self._shown and self._head.object:
            return
        self._shown = plan
        # A chart without data has no ranges: a sentence stands in its place.
        drawn = (bool(plan and plan.curves), bool(plan and plan.front))
        for is_drawn, chart, text in zip(drawn, self._charts, self._no_chart, strict=True):
            chart.visible = is_drawn
            text.object = "" if is_drawn else empty_text(_NO_CHART)
        if plan is None:
            self._head.object = empty_text(_NONE)
            self._ranking.object = empty_text("–")
            return
        self._head.object = _head_html(plan)
        self._ranking.object = ways_html(plan)
        self._target.location, self._rate.location = plan.target, plan.rate
        for way, source in self._curves.items():
            curve = next((one for one in plan.curves if _way_of(one.name) == way), None)
            source.data = {
                "rate": list(curve.rates) if curve else [],
                "share": list(curve.attainment) if curve else [],
            }
        most = max((point.price_per_hour for point in plan.front), default=1.0) or 1.0
        for way, source in self._front.items():
            points = [point for point in plan.front if _way_of(point.name) == way]
            source.data = _front_columns(points, most)
        best = lightest(plan.front)
        self._best.data = {"rate": [p.rate for p in best], "gpus": [p.num_gpus for p in best]}
        chosen = [plan.chosen.num_gpus] if plan.chosen else []
        self._chosen.data = {"rate": [plan.rate] * len(chosen), "gpus": chosen}

    def _colour(self, way: str) -> str:
        return self.theme.colocated if way == _TOGETHER else self.theme.decode

    def _new_curves(self) -> figure:
        chart = new_figure(self.theme, height=300, x_axis_label="requests/s")
        chart.yaxis.formatter = NumeralTickFormatter(format="0%")
        chart.y_range.start, chart.y_range.end = 0, 1.03
        for way, source in self._curves.items():
            colour = self._colour(way)
            chart.line("rate", "share", source=source, line_color=colour, line_width=2.2,
                       legend_label=way)  # fmt: skip
            chart.scatter("rate", "share", source=source, color=colour, size=6)
        chart.add_layout(self._target)
        chart.add_layout(self._rate)
        chart.add_tools(HoverTool(tooltips=[("rate", "@rate{0.0}/s"), ("share", "@share{0.0%}")]))
        style_legend(chart, self.theme)
        return chart

    def _new_front(self) -> figure:
        theme = self.theme
        chart = new_figure(theme, height=300, x_axis_label="requests/s", y_axis_label="GPUs")
        chart.y_range.start, chart.y_range.range_padding = 0, 0.3
        chart.yaxis.ticker.min_interval = 1
        chart.line("rate", "gpus", source=self._best, line_color=theme.muted,
                   line_dash="dotted", legend_label="fewest")  # fmt: skip
        tips = [("rate", "@rate{0.0}/s"), ("", "@instances"), ("$/h", "@price{0.00}")]
        for way, source in self._front.items():
            dots = chart.scatter("rate", "gpus", size="size", source=source, fill_alpha=0.45,
                                 color=self._colour(way), legend_label=way)  # fmt: skip
            chart.add_tools(HoverTool(renderers=[dots], tooltips=tips))
        chart.scatter("rate", "gpus", source=self._chosen, size=15, marker="diamond",
                      color=theme.good, line_color=theme.text,
                      legend_label="the plan, simulated")  # fmt: skip
        style_legend(chart, theme)
        return chart


def _way_of(name: str) -> str:
    return _TOGETHER if name.startswith(_TOGETHER) else _APART


def _front_columns(points: Sequence[FrontPoint], most_dollars: float) -> dict[str, list[Any]]:
    return {
        "rate": [point.rate for point in points],
        "gpus": [point.num_gpus for point in points],
        "price": [point.price_per_hour for point in points],
        "instances": [point.instances for point in points],
        "size": [8 + 22 * math.sqrt(point.price_per_hour / most_dollars) for point in points],
    }


def _pane(chart: figure) -> pn.pane.Bokeh:
    return pn.pane.Bokeh(chart, sizing_mode="stretch_width", margin=0)


def _head_html(plan: PlanRecord) -> str:
    chosen = plan.chosen
    asked = question_text(plan.question)
    if chosen is None:
        lead = f'<span class="bad">{escape(plan.status)}</span>: {escape(plan.reason)}'
    else:
        lead = (
            f"<b>{escape(chosen.instances)}</b>: {chosen.num_gpus} GPUs,"
            f" {dollars_text(chosen.price_per_hour)} per hour for {number_text(plan.rate)} req/s"
        )
    lines = "".join(f"<li>{escape(line)}</li>" for line in plan.explanation)
    return f'<p class="lead">{lead}</p><div class="muted">{escape(asked)}</div><ul>{lines}</ul>'


def question_text(question: dict[str, Any]) -> str:
    """What was asked, in one line."""
    q = question
    if "cluster" in q:  # from the command line, already in words
        return f"{q['model']} on {q['cluster']}, {q['workload']}, {q['slo']}"
    return (
        f"{q['model']} on {q['num_nodes']} × {q['gpus_per_node']} {q['gpu']} at"
        f" {q['network_gbps']:g} Gbit/s, {q['rate']:g} req/s of {q['prompt_tokens']} prompt and"
        f" {q['output_tokens']} output tokens, TTFT {seconds_text(q['ttft_s'])}, TPOT"
        f" {seconds_text(q['tpot_s'])}"
    )
