"""What-if: change what is asked and see at once what it would take, then what it really takes."""

from __future__ import annotations

import threading
import time
from typing import Any

import panel as pn

from daskserve.dashboards.feed import Feed
from daskserve.dashboards.page import Card, Page, empty_text, html_pane
from daskserve.dashboards.question import Question, estimate_of
from daskserve.dashboards.refining import Progress, Refiner
from daskserve.dashboards.theme import Theme, dollars_text, escape, number_text
from daskserve.dashboards.ways import ways_css, ways_html
from daskserve.errors import DaskserveError
from daskserve.planner.hardware import GPUS
from daskserve.planner.model_presets import MODEL_CONFIGS
from daskserve.planner.plan_record import PlanRecord

_REFINE_AFTER_S = 0.6
"""Simulations begin when nothing was changed for so long."""
_RATES = (1, 2, 5, 10, 15, 20, 30, 40, 60, 80, 100, 150, 200, 300, 500)
_TOKENS = (1, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384)
_TTFTS_S = (0.05, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2.5, 4, 8, 15)
_TPOTS_S = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
_GBPS = (10, 25, 50, 100, 200, 400, 800, 1600, 3200)


class WhatIfPage(Page):
    """The question on the left; its answer, first estimated and then simulated, on the right.

    Parameters
    ----------
    refiner
        Simulates, for all sessions.
    """

    title, path = "What-if", "whatif"

    def __init__(self, feed: Feed, theme: Theme, refiner: Refiner, **params: Any) -> None:
        super().__init__(feed, theme, **params)
        self._refiner = refiner
        self._timer: threading.Timer | None = None
        self._widgets = _new_widgets(Question())
        for name, widget in self._widgets.items():
            is_slider = isinstance(widget, pn.widgets.DiscreteSlider)
            changed = "value_throttled" if is_slider else "value"
            widget.param.watch(self._on_gpu if name == "gpu" else self._on_change, changed)
        self._state = html_pane(theme, _state_css(theme))
        self._answer = html_pane(theme, ways_css(theme) + _answer_css(theme))
        form = pn.FlexBox(
            *self._widgets.values(), sizing_mode="stretch_width", gap="4px 26px", margin=0
        )
        answer = pn.Column(self._state, self._answer, sizing_mode="stretch_width", margin=0)
        self.cards = [
            Card("What is asked", form, "full"),
            Card("Answer", answer, "full", "P prefill, D decode, C colocated instances"),
        ]
        self._ask()

    @property
    def question(self) -> Question:
        """What the widgets say."""
        return Question(**{name: widget.value for name, widget in self._widgets.items()})

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._refiner.drop(self)

    def _on_gpu(self, event: Any) -> None:
        price = GPUS[event.new].price_per_hour
        if self._widgets["price"].value == price:
            self.soon(self._ask)
        else:
            self._widgets["price"].value = price  # asks

    def _on_change(self, event: Any) -> None:
        self.soon(self._ask)

    def _ask(self) -> None:
        """Estimate here and now; simulate once nothing has been changed for a moment."""
        question = self.question
        for name, widget in self._widgets.items():
            widget.disabled = name in question.without_say()
        if self._timer is not None:
            self._timer.cancel()
        self._refiner.drop(self)
        started_at = time.perf_counter()
        try:
            first = estimate_of(question)
        except DaskserveError as error:
            self._state.object = _state_html("cannot", "cannot be planned", str(error))
            self._answer.object = ""
            return
        took_ms = (time.perf_counter() - started_at) * 1000
        self._state.object = _state_html(
            "estimate", "estimate", f"by formula, in {took_ms:.0f} ms; the simulation follows"
        )
        self._answer.object = _answer_html(first)
        self._timer = threading.Timer(_REFINE_AFTER_S, self._refine, (question,))
        self._timer.daemon = True
        self._timer.start()

    def _refine(self, question: Question) -> None:
        def tell(news: Progress | PlanRecord | str) -> None:
            if isinstance(news, PlanRecord):
                self.feed.note_plan(news)
            self.soon(lambda: self._show(question, news))

        self._refiner.ask(self, question, tell)

    def _show(self, question: Question, news: Progress | PlanRecord | str) -> None:
        if question != self.question:
            return  # an answer to what is no longer asked
        if isinstance(news, Progress):
            text = f"by formula; meanwhile {news.stage}: {news.num_done} done"
            self._state.object = _state_html("estimate", "estimate", text)
        elif isinstance(news, str):
            self._state.object = _state_html("cannot", "no plan", news)
        else:
            self._state.object = _state_html(
                "plan", "plan", "simulated; curves and reasons on the Plan page"
            )
            self._answer.object = _answer_html(news)


def _new_widgets(asked: Question) -> dict[str, pn.widgets.Widget]:
    def slider(label: str, options: tuple[float, ...], value: float) -> pn.widgets.DiscreteSlider:
        return pn.widgets.DiscreteSlider(
            label=label, options=list(options), value=value, width=230, margin=(4, 0)
        )

    def choice(label: str, options: list[Any], value: Any) -> pn.widgets.Select:
        return pn.widgets.Select(
            label=label, options=options, value=value, width=150, margin=(4, 0)
        )

    return {
        "model": choice("Model", list(MODEL_CONFIGS), asked.model),
        "gpu": choice("GPU", list(GPUS), asked.gpu),
        "gpus_per_node": choice("GPUs per node", [1, 2, 4, 8], asked.gpus_per_node),
        "num_nodes": choice("Nodes", [1, 2, 4, 8, 16], asked.num_nodes),
        "price": pn.widgets.FloatInput(
            label="Dollars per GPU and hour", value=asked.price, start=0.01, step=0.1, width=160,
            margin=(4, 0),
        ),
        "rate": slider("Rate, requests/s", _RATES, 20),
        "prompt_tokens": slider("Prompt tokens", _TOKENS, asked.prompt_tokens),
        "output_tokens": slider("Output tokens", _TOKENS, asked.output_tokens),
        "ttft_s": slider("TTFT limit, s", _TTFTS_S, asked.ttft_s),
        "tpot_s": slider("TPOT limit, s", _TPOTS_S, asked.tpot_s),
        "network_gbps": slider("Network per node, Gbit/s", _GBPS, 400),
    }  # fmt: skip


def _state_html(kind: str, label: str, text: str) -> str:
    return f'<p class="{kind}"><b>{escape(label)}</b> {escape(text)}</p>'


def _answer_html(plan: PlanRecord) -> str:
    chosen = plan.chosen
    if chosen is None:
        lead = f'<span class="bad">out of reach</span> <small>{escape(plan.reason)}</small>'
    else:
        lead = (
            f"{chosen.num_gpus} GPUs <small>{escape(chosen.instances)}</small>"
            f'<span class="side">{dollars_text(chosen.price_per_hour)}/h,'
            f" {dollars_text(chosen.price_per_million_tokens)} per million tokens at"
            f" {number_text(plan.rate)} req/s</span>"
        )
    table = ways_html(plan) if plan.ways else empty_text(plan.reason)
    return f'<div class="lead {plan.status}">{lead}</div>{table}'


def _state_css(theme: Theme) -> str:
    return f"""
    p {{ margin: 0 0 10px; color: {theme.muted}; }}
    b {{ display: inline-block; padding: 2px 10px; border-radius: 10px; margin-right: 8px;
         font-weight: 600; color: {theme.card}; background: {theme.muted}; }}
    .estimate b {{ background: {theme.prefill}; }}
    .plan b {{ background: {theme.good}; }}
    .cannot b {{ background: {theme.bad}; }}
    """


def _answer_css(theme: Theme) -> str:
    return f"""
    .lead {{ font-size: 25px; font-weight: 650; margin: 2px 0 10px; }}
    .lead small {{ font-size: 15px; font-weight: 400; margin-left: 10px; }}
    .lead .side {{ display: block; font-size: 14px; font-weight: 400; color: {theme.muted}; }}
    .lead.estimate {{ opacity: 0.8; }}
    """
