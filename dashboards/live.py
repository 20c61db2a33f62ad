"""Live: is the service meeting its SLO, at what cost, and where do requests wait?"""

from __future__ import annotations

from typing import Any

import panel as pn
from bokeh.models import (
    BasicTicker,
    ColorBar,
    ColumnDataSource,
    Line,
    LinearColorMapper,
    NumeralTickFormatter,
    Rect,
    Stack,
    VArea,
)
from bokeh.plotting import figure

from daskserve.core.instance import Role
from daskserve.core.slo import SLO
from daskserve.dashboards.feed import Feed
from daskserve.dashboards.numbers import Number, numbers_html, numbers_pane
from daskserve.dashboards.page import Card, Page
from daskserve.dashboards.theme import (
    Theme,
    add_glyph,
    add_legend,
    buttons_css,
    dollars_text,
    local_ms,
    new_figure,
    number_text,
    percent_text,
    seconds_text,
)
from daskserve.observe import Sample

SPANS_S = {"5 min": 300, "15 min": 900, "1 h": 3600, "4 h": 14400}
MOST_POINTS = 600
_STAGES = ("prefill", "decode", "transfer")
_STAGE_NAMES = {"prefill": "prefill", "decode": "room for decode", "transfer": "KV transfer"}
_ROLES = tuple(role.value for role in Role)
_PERCENTILES = ("p50", "p90", "p99")
_NAN = float("nan")
_ROW_PX, _LEAST_PX, _MOST_PX = 24, 180, 620


def columns_of(sample: Sample) -> dict[str, list[Any]]:
    """One row for the charts over time."""
    row: dict[str, Any] = {"time": local_ms(sample.at)}
    for metric in ("ttft", "tpot"):
        limit = getattr(sample.slo, f"{metric}_s") if sample.slo else None
        for name in _PERCENTILES:
            value = getattr(getattr(sample, f"{metric}_s"), name)
            row[f"{metric}_{name}"] = _NAN if value is None else value
        p90 = row[f"{metric}_p90"]
        row[f"{metric}_limit"] = _NAN if limit is None else limit
        # Shaded from the limit up to the p90 that violates it.
        row[f"{metric}_over"] = p90 if limit is not None and p90 > limit else row[f"{metric}_limit"]
    row |= {f"wait_{stage}": sample.waiting.get(stage, 0) for stage in _STAGES}
    row |= {role: sample.gpus_of(Role(role)) for role in _ROLES}
    return {name: [value] for name, value in row.items()}


def kv_columns_of(sample: Sample, width_ms: float) -> dict[str, list[Any]]:
    """One row per instance for the heatmap."""
    instances = sample.instances
    return {
        "time": [local_ms(sample.at)] * len(instances),
        "width": [width_ms] * len(instances),
        "instance": [one.name for one in instances],
        "used": [one.kv_share for one in instances],
    }


class LivePage(Page):
    """Numbers with their trend, and charts of the last minutes."""

    title, path = "Live", "live"

    def __init__(self, feed: Feed, theme: Theme, price_per_gpu_hour: float, **params: Any) -> None:
        super().__init__(feed, theme, **params)
        self._price = price_per_gpu_hour
        self._seen = 0
        self._stride = 1
        self._rows = ColumnDataSource({name: [] for name in _empty_columns()})
        self._kv = ColumnDataSource({"time": [], "width": [], "instance": [], "used": []})
        self._numbers = numbers_pane(theme)
        self._span = pn.widgets.RadioButtonGroup(
            options=SPANS_S,
            value=300,
            margin=(12, 0, 0, 0),
            align="end",
            stylesheets=[buttons_css(theme)],
        )
        self._span.param.watch(lambda event: self.soon(self._reload), "value")
        self._heatmap = self._new_heatmap()
        charts = {metric: self._new_latencies(metric) for metric in ("ttft", "tpot")}
        self.cards = [
            Card("", pn.Column(self._numbers, self._span, sizing_mode="stretch_width"), "bare"),
            Card("Time to first token", _pane(charts["ttft"]), note="p50, p90, p99; red: p90 above"
                 " the SLO"),
            Card("Time per output token", _pane(charts["tpot"]), note="after the first one"),
            Card("Requests that wait", _pane(self._new_queues()), note="by what they wait for"),
            Card("KV in use", _pane(self._heatmap), note="share of each instance's pages"),
            Card("GPUs by role", _pane(self._new_strip()), "full", note="prefill : decode"),
        ]  # fmt: skip
        self._reload()

    def update(self) -> None:
        samples, self._seen = self.feed.since(self._seen)
        if not samples:
            return
        span_s = self._span.value
        if len(samples) > self._stride * 60:  # a whole recording at once
            self._reload()
            return
        kept = [s for i, s in enumerate(samples, self._seen - len(samples)) if not i % self._stride]
        with pn.io.hold():
            for sample in kept:
                self._rows.stream(columns_of(sample), rollover=span_s // self._stride)
                self._stream_kv(sample)
            self._show_numbers()

    def _reload(self) -> None:
        """Draw the whole span anew, thinned to what a chart can show."""
        samples, self._seen = self.feed.since(0)
        span_s = self._span.value
        if samples:
            samples = [s for s in samples if s.at >= samples[-1].at - span_s]
        self._stride = max(1, span_s // MOST_POINTS)
        first = self._seen - len(samples)
        kept = [s for i, s in enumerate(samples, first) if not i % self._stride]
        rows = _empty_columns()
        kv: dict[str, list[Any]] = {name: [] for name in self._kv.data}
        for sample in kept:
            for name, value in columns_of(sample).items():
                rows[name] += value
            for name, value in kv_columns_of(sample, self._width_ms).items():
                kv[name] += value
        self._rows.data, self._kv.data = rows, kv
        self._show_instances()
        self._show_numbers()

    @property
    def _width_ms(self) -> float:
        return 1060.0 * self._stride  # no gaps between cells

    # Numbers.

    def _show_numbers(self) -> None:
        samples, _ = self.feed.since(max(0, self._seen - 120))
        self._numbers.object = numbers_html(self._all_numbers(samples), self.theme)

    def _all_numbers(self, samples: list[Sample]) -> list[Number]:
        newest = samples[-1] if samples else None
        slo = newest.slo if newest else None
        target = slo.attainment if slo else None

        def series(get: Any) -> list[float | None]:
            return [get(sample) for sample in samples]

        no_slo = "" if slo or newest is None else "no SLO: start with --slo-ttft and --slo-tpot"
        limits = f"TTFT {seconds_text(slo.ttft_s)}, TPOT {seconds_text(slo.tpot_s)}" if slo else ""
        rate = failed = ""
        if newest is not None:
            rate = f"{number_text(newest.finished_per_s)} finished/s"
            failed = f", {number_text(newest.failed_per_s)} failed/s" if newest.failed_per_s else ""
        price = f"at ${self._price:g} per GPU and hour"
        return [
            Number("Goodput", "req/s per GPU", series(lambda s: s.goodput_per_gpu), number_text,
                   no_slo or limits),
            Number("Attainment", "", series(lambda s: s.attainment), percent_text,
                   no_slo or (f"target {target:.0%}" if target else ""), least=target),
            Number("Rate", "req/s", series(lambda s: s.arrived_per_s), number_text, rate + failed),
            Number("Cost", "/M tokens",
                   series(lambda s: s.cost_per_million_tokens(self._price)), dollars_text, price),
            Number("Output", "tokens/s", series(lambda s: s.output_tokens_per_s), number_text,
                   f"{number_text(newest.prompt_tokens_per_s)} prompt tokens/s" if newest else ""),
        ]  # fmt: skip

    # Charts.

    def _new_latencies(self, metric: str) -> figure:
        chart = new_figure(self.theme, seconds_axis=True, x_axis_type="datetime")
        chart.y_range.start, chart.y_range.range_padding = 0, 0.25
        source = self._rows
        add_legend(chart, self.theme)
        over = VArea(x="time", y1=f"{metric}_limit", y2=f"{metric}_over",
                     fill_color=self.theme.bad, fill_alpha=0.25)  # fmt: skip
        add_glyph(chart, source, over)
        for name, width in (("p99", 1.2), ("p90", 2.2), ("p50", 1.6)):
            colour = getattr(self.theme, name)
            line = Line(x="time", y=f"{metric}_{name}", line_color=colour, line_width=width)
            add_glyph(chart, source, line, name)
        limit = Line(x="time", y=f"{metric}_limit", line_color=self.theme.bad,
                     line_dash="dashed", line_width=1.4)  # fmt: skip
        add_glyph(chart, source, limit, "SLO")
        return chart

    def _new_queues(self) -> figure:
        chart = new_figure(self.theme, x_axis_type="datetime")
        chart.y_range.start = 0
        chart.yaxis.formatter = NumeralTickFormatter(format="0,0.[0]a")
        add_legend(chart, self.theme)
        for stage in _STAGES:
            colour = getattr(self.theme, stage)
            line = Line(x="time", y=f"wait_{stage}", line_color=colour, line_width=2)
            add_glyph(chart, self._rows, line, _STAGE_NAMES[stage])
        return chart

    def _new_strip(self) -> figure:
        chart = new_figure(self.theme, height=130, x_axis_type="datetime")
        chart.y_range.start = 0
        chart.yaxis.ticker.min_interval = 1
        add_legend(chart, self.theme)
        for i, role in enumerate(_ROLES):
            below, above = Stack(fields=_ROLES[:i]), Stack(fields=_ROLES[: i + 1])
            area = VArea(x="time", y1={"expr": below}, y2={"expr": above},
                         fill_color=self.theme.of_role(role), fill_alpha=0.8)  # fmt: skip
            add_glyph(chart, self._rows, area, role.lower())
        return chart

    def _new_heatmap(self) -> figure:
        chart = new_figure(self.theme, x_axis_type="datetime", y_range=["-"])
        mapper = LinearColorMapper(palette=self.theme.ramp, low=0.0, high=1.0)
        share = {"field": "used", "transform": mapper}
        cell = Rect(x="time", y="instance", width="width", height=0.92, line_color=None,
                    fill_color=share)  # fmt: skip
        add_glyph(chart, self._kv, cell)
        chart.ygrid.grid_line_color = None
        bar = ColorBar(
            color_mapper=mapper,
            width=10,
            padding=4,
            ticker=BasicTicker(desired_num_ticks=3),
            formatter=NumeralTickFormatter(format="0%"),
            major_label_text_color=self.theme.muted,
            background_fill_alpha=0,
            bar_line_color=None,
            major_tick_line_color=None,
        )
        chart.add_layout(bar, "right")
        return chart

    def _stream_kv(self, sample: Sample) -> None:
        self._show_instances()
        rows = kv_columns_of(sample, self._width_ms)
        count = len(rows["time"])
        if count:
            self._kv.stream(rows, rollover=count * self._span.value // self._stride)

    def _show_instances(self) -> None:
        """A row of the heatmap per instance, those with prefill on top."""
        newest = self.feed.newest
        names = [one.name for one in in_order(newest)] if newest else []
        factors = names[::-1] or ["-"]
        if self._heatmap.y_range.factors != factors:
            self._heatmap.y_range.factors = factors
            height = min(max(_ROW_PX * len(factors) + 60, _LEAST_PX), _MOST_PX)
            self._heatmap.height = max(height, 240)


def in_order(sample: Sample) -> list[Any]:
    """Instances by role, then by name as people count."""

    def place(one: Any) -> tuple[int, str, int]:
        head, _, number = one.name.rpartition("-")
        return _ROLES.index(one.role), head, int(number) if number.isdigit() else 0

    return sorted(sample.instances, key=place)


def _empty_columns() -> dict[str, list[Any]]:
    return {name: [] for name in columns_of(Sample(at=0.0, window_s=1.0, slo=SLO(1.0, 1.0)))}


def _pane(chart: figure) -> pn.pane.Bokeh:
    return pn.pane.Bokeh(chart, sizing_mode="stretch_width", margin=0)
