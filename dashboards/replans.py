"""Replans: when the replanner looked, why it changed something or not, and what came of it."""

from __future__ import annotations

import time
from typing import Any

import pandas as pd
import panel as pn
from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter
from bokeh.plotting import figure

from daskserve.dashboards.feed import Feed
from daskserve.dashboards.page import Card, Page, empty_text, html_pane
from daskserve.dashboards.tables import Column, new_table, show_rows
from daskserve.dashboards.theme import (
    Theme,
    clock_text,
    escape,
    local_ms,
    new_figure,
    number_text,
    percent_text,
    seconds_text,
    style_legend,
)
from daskserve.observe import Sample
from daskserve.replanning.decision import Decision, Prediction

_COLUMNS = (
    Column("when", "When"),
    Column("trigger", "Trigger", hides=2),
    Column("change", "Change"),
    Column("predicted", "Predicted", "number", hides=1),
    Column("measured", "Measured", "number", hides=3),
    Column("took", "Took", "number", hides=4),
    Column("status", "Status"),
    Column("reason", "Reason", least_px=240),
)
_MOST_POINTS = 900
_NONE = (
    "The replanner has not looked yet, or none runs. Every look is listed here with its reason,"
    " also when nothing is changed."
)


class ReplansPage(Page):
    """A timeline, a table, and the evidence of the row that is clicked."""

    title, path = "Replans", "replans"
    extensions = ("tabulator",)

    def __init__(self, feed: Feed, theme: Theme, **params: Any) -> None:
        super().__init__(feed, theme, **params)
        self._shown: list[Decision] | None = None
        self._lines = ColumnDataSource({"time": [], "attainment": []})
        self._marks = ColumnDataSource({name: [] for name in _mark_columns([], {})})
        self._seen = 0
        self._none = html_pane(theme)
        self._table = new_table(
            theme, _COLUMNS, selectable=1, max_height=420,
        )  # fmt: skip
        self._table.param.watch(lambda event: self.soon(self._show_evidence), "selection")
        self._evidence = html_pane(theme, _css(theme))
        table = pn.Column(self._none, self._table, sizing_mode="stretch_width", margin=0)
        self.cards = [
            Card("Timeline", pn.pane.Bokeh(self._new_timeline(), sizing_mode="stretch_width",
                 margin=0), "full", "attainment; changes and looks without one"),
            Card("Decisions", table, "full", "goodput in req/s; click a row for its evidence"),
            Card("Evidence", self._evidence, "full"),
        ]  # fmt: skip
        self.update()

    def update(self) -> None:
        samples, seen = self.feed.since(self._seen)
        if samples:
            self._seen = seen
            self._draw(samples)
        decisions = self.feed.decisions
        if decisions == self._shown:
            return
        self._shown = decisions
        self._none.object = "" if decisions else empty_text(_NONE)
        self._table.visible = bool(decisions)
        rows = [_row(one) for one in decisions]
        show_rows(self._table, pd.DataFrame(rows, columns=[c.name for c in _COLUMNS]))
        self._marks.data = _mark_columns(decisions, self.theme_colours)
        self._show_evidence()

    @property
    def theme_colours(self) -> dict[bool, str]:
        """Of a change, and of a look without one."""
        return {True: self.theme.prefill, False: self.theme.muted}

    def _draw(self, samples: list[Sample]) -> None:
        stride = max(1, len(samples) // _MOST_POINTS)
        kept = samples[::stride]
        rows = {
            "time": [local_ms(one.at) for one in kept],
            "attainment": [float("nan") if o.attainment is None else o.attainment for o in kept],
        }
        self._lines.stream(rows, rollover=2 * _MOST_POINTS)

    def _new_timeline(self) -> figure:
        chart = new_figure(self.theme, height=210, x_axis_type="datetime")
        chart.yaxis.formatter = NumeralTickFormatter(format="0%")
        chart.y_range.start, chart.y_range.end = 0, 1.05
        chart.line("time", "attainment", source=self._lines, line_color=self.theme.decode,
                   line_width=1.8, legend_label="attainment")  # fmt: skip
        stems = chart.segment("time", "low", "time", "high", source=self._marks,
                              line_color="colour", line_width=1.6)  # fmt: skip
        chart.scatter("time", "high", source=self._marks, marker="marker", color="colour", size=11,
                      legend_field="kind")  # fmt: skip
        tips = [("", "@when"), ("", "@change")]
        chart.add_tools(HoverTool(renderers=[stems], tooltips=tips))
        style_legend(chart, self.theme)
        return chart

    def _show_evidence(self) -> None:
        decisions = self._shown or []
        selected = self._table.selection
        index = selected[0] if selected and selected[0] < len(decisions) else 0
        text = evidence_html(decisions[index]) if decisions else empty_text("–")
        if self._evidence.object != text:
            self._evidence.object = text


def _row(one: Decision) -> dict[str, Any]:
    outcome = one.outcome
    return {
        "when": _when(one),
        "trigger": one.trigger.value,
        "change": _change(one),
        "predicted": number_text(one.after.goodput_rps) if one.after else "–",
        "measured": number_text(outcome.goodput_rps) if outcome else "–",
        "took": seconds_text(outcome.took_s) if outcome and one.is_change else "–",
        "status": _status(one),
        "reason": one.reason,
    }


def _when(one: Decision) -> str:
    is_today = time.time() - one.at_unix_s < 86400
    date = "" if is_today else time.strftime("%Y-%m-%d ", time.localtime(one.at_unix_s))
    return date + clock_text(one.at_unix_s)


def _change(one: Decision) -> str:
    if not one.is_change:
        return "no change"
    if one.before and one.after:
        return f"{one.before.split} → {one.after.split}"
    return ", ".join(f"{action.kind.value} {action.role.value.lower()}" for action in one.actions)


def _status(one: Decision) -> str:
    if one.outcome is not None:
        return one.outcome.status.value
    if one.is_dry_run:
        return "dry run"
    return "under way" if one.is_change else "–"


def _mark_columns(decisions: list[Decision], colours: dict[bool, str]) -> dict[str, list[Any]]:
    return {
        "time": [local_ms(one.at_unix_s) for one in decisions],
        "low": [0.0 for one in decisions],
        "high": [1.0 if one.is_change else 0.12 for one in decisions],
        "colour": [colours[one.is_change] for one in decisions],
        "marker": ["inverted_triangle" if one.is_change else "circle" for one in decisions],
        "kind": ["change" if one.is_change else "no change" for one in decisions],
        "when": [_when(one) for one in decisions],
        "change": [_change(one) for one in decisions],
    }


def evidence_html(one: Decision) -> str:
    """All that a decision rests on and what came of it; names are escaped."""
    rows = "".join(
        f"<tr><td>{escape(e.name.replace('_', ' '))}</td>"
        f'<td class="number">{number_text(e.before)}</td>'
        f'<td class="number">{number_text(e.now)}</td>'
        f'<td class="number {"bad" if e.statistic >= e.threshold else ""}">'
        f"{number_text(e.statistic)}</td>"
        f'<td class="number">{number_text(e.threshold)}</td></tr>'
        for e in one.evidence
    )
    heads = "<th>Figure</th>" + "".join(
        f'<th class="number">{h}</th>' for h in ("Before", "Now", "Statistic", "Threshold")
    )
    table = f"<table><tr>{heads}</tr>{rows}</table>" if rows else empty_text("No figures.")
    return (
        f"<p><b>{escape(_when(one))}</b> {escape(one.reason)}</p>"
        f'<div class="columns"><div>{table}</div><div>{_expected(one)}</div></div>'
    )


def _expected(one: Decision) -> str:
    lines = []
    after = "As decided" if one.is_change else "Best other"
    for label, prediction in (("As it was", one.before), (after, one.after)):
        if prediction is not None:
            lines.append((label, _prediction(prediction)))
    if one.is_change:
        lines.append(("Gain", f"{number_text(one.gain_rps)} req/s"))
        cost = f"{seconds_text(one.switching_s)}, {number_text(one.switching_requests)} requests"
        lines.append(("Switching cost", cost))
        steps = (
            f"{a.kind.value} {a.role.value.lower()} {a.shape} {a.instance}" for a in one.actions
        )
        lines.append(("Actions", "; ".join(steps)))
    outcome = one.outcome
    if outcome is not None:
        reached = f"{number_text(outcome.goodput_rps)} req/s, {percent_text(outcome.attainment)}"
        lines.append(("Measured", f"{reached} over {seconds_text(outcome.measured_s)}"))
        pause = f"longest pause {seconds_text(outcome.pause_s)}, {outcome.num_failed} failed"
        lines.append(("Took", f"{seconds_text(outcome.took_s)}, {pause}"))
        if outcome.error:
            lines.append(("Error", outcome.error))
    rows = "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in lines)
    return f"<table>{rows}</table>"


def _prediction(one: Prediction) -> str:
    share = "" if one.attainment is None else f", {percent_text(one.attainment)} at this rate"
    return f"{one.split}: up to {number_text(one.goodput_rps)} req/s{share}"


def _css(theme: Theme) -> str:
    return """
    p { margin: 0 0 8px; } p b { margin-right: 10px; }
    .columns { display: flex; flex-wrap: wrap; gap: 10px 60px; }
    td { overflow-wrap: anywhere; }
    """
