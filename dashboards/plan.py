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
    " with its curves."
)


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
        self._curves, self._front = (pn.Column(sizing_mode="stretch_width") for _ in range(2))
        self.cards = [
            Card("Plan", self._head, "full"),
            Card("Ranking", self._ranking, "full", "P prefill, D decode, C colocated instances"),
            Card("Attainment against rate", self._curves, note="share within both limits,"
                 " simulated"),
            Card("GPUs, cost and rate", self._front, note="lightest instances by formula; area:"
                 " dollars per hour"),
        ]  # fmt: skip
        self.update()

    def update(self) -> None:
        plan = self.feed.plan
        if plan is self._shown and self._head.object:
            return
        self._shown = plan
        self._head.object = empty_text(_NONE) if plan is None else _head_html(plan)
        self._ranking.object = empty_text("–") if plan is None else ways_html(plan)
        has_curves = plan is not None and plan.curves
        has_front = plan is not None and plan.front
        self._curves.objects = [self._curve_chart(plan) if has_curves else _nothing(self.theme)]
        self._front.objects = [self._front_chart(plan) if has_front else _nothing(self.theme)]

    def _curve_chart(self, plan: PlanRecord) -> pn.pane.Bokeh:
        theme = self.theme
        chart = new_figure(theme, height=300, x_axis_label="requests/s")
        chart.yaxis.formatter = NumeralTickFormatter(format="0%")
        chart.y_range.start, chart.y_range.end = 0, 1.03
        for curve, colour in zip(plan.curves, (theme.decode, theme.colocated), strict=False):
            source = ColumnDataSource({"rate": curve.rates, "share": curve.attainment})
            name = "colocated" if curve.name.startswith("colocated") else "prefill, decode apart"
            chart.line("rate", "share", source=source, line_color=colour, line_width=2.2,
                       legend_label=name)  # fmt: skip
            chart.scatter("rate", "share", source=source, color=colour, size=6)
        _add_target(chart, theme, plan)
        chart.add_tools(HoverTool(tooltips=[("rate", "@rate{0.0}/s"), ("share", "@share{0.0%}")]))
        style_legend(chart, theme)
        return pn.pane.Bokeh(chart, sizing_mode="stretch_width", margin=0)

    def _front_chart(self, plan: PlanRecord) -> pn.pane.Bokeh:
        theme = self.theme
        chart = new_figure(theme, height=300, x_axis_label="requests/s", y_axis_label="GPUs")
        chart.y_range.start, chart.y_range.range_padding = 0, 0.3
        best = lightest(plan.front)
        chart.step(
            [p.rate for p in best], [p.num_gpus for p in best], mode="after",
            line_color=theme.muted, line_dash="dotted", legend_label="fewest",
        )  # fmt: skip
        names = list(dict.fromkeys(point.name for point in plan.front))
        for name in names:
            colour = theme.colocated if name == "colocated" else theme.decode
            points = [point for point in plan.front if point.name == name]
            renderer = chart.scatter(
                "rate", "gpus", size="size", source=_front_source(points, plan.front),
                color=colour, fill_alpha=0.45, legend_label=name,
            )  # fmt: skip
            tips = [("rate", "@rate{0.0}/s"), ("", "@instances"), ("$/h", "@price{0.00}")]
            chart.add_tools(HoverTool(renderers=[renderer], tooltips=tips))
        chosen = plan.chosen
        if chosen is not None:
            chart.scatter(
                [plan.rate], [chosen.num_gpus], size=15, marker="diamond", color=theme.good,
                line_color=theme.text, legend_label="the plan, simulated",
            )  # fmt: skip
        style_legend(chart, theme)
        return pn.pane.Bokeh(chart, sizing_mode="stretch_width", margin=0)


def _front_source(points: Sequence[FrontPoint], everything: Sequence[FrontPoint]) -> Any:
    most = max(point.price_per_hour for point in everything) or 1.0
    return ColumnDataSource(
        {
            "rate": [point.rate for point in points],
            "gpus": [point.num_gpus for point in points],
            "price": [point.price_per_hour for point in points],
            "instances": [point.instances for point in points],
            "size": [8 + 22 * math.sqrt(point.price_per_hour / most) for point in points],
        }
    )


def _add_target(chart: figure, theme: Theme, plan: PlanRecord) -> None:
    for dimension, location in (("width", plan.target), ("height", plan.rate)):
        chart.add_layout(
            Span(
                location=location,
                dimension=dimension,
                line_dash="dashed",
                line_color=theme.bad if dimension == "width" else theme.muted,
            )
        )


def _nothing(theme: Theme) -> pn.pane.HTML:
    return html_pane(theme, text=empty_text("Nothing was simulated."))


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
    return (
        f"{q['model']} on {q['num_nodes']} × {q['gpus_per_node']} {q['gpu']} at"
        f" {q['network_gbps']:g} Gbit/s, {q['rate']:g} req/s of {q['prompt_tokens']} prompt and"
        f" {q['output_tokens']} output tokens, TTFT {seconds_text(q['ttft_s'])}, TPOT"
        f" {seconds_text(q['tpot_s'])}"
    )
