"""Instances: what runs where, and how busy each one is."""

from __future__ import annotations

from typing import Any

import pandas as pd

from daskserve.dashboards.feed import Feed
from daskserve.dashboards.live import in_order
from daskserve.dashboards.page import Card, Page, empty_text, html_pane
from daskserve.dashboards.tables import Column, new_table, show_rows
from daskserve.dashboards.theme import Theme, escape
from daskserve.observe import InstanceSample, Sample

_COLUMNS = (
    Column("name", "Instance"),
    Column("role", "Role"),
    Column("state", "State"),
    Column("kv", "KV %", "share", 110),
    Column("queue", "Queue", "number"),
    Column("running", "Running", "number"),
    Column("tokens", "Tokens/s", "number"),
    Column("holding", "Holding KV", "number"),
    Column("tp", "TP", "number"),
    Column("pp", "PP", "number"),
    Column("host", "Host"),
    Column("gpu", "GPU"),
    Column("address", "Address"),
    Column("error", "Note", least_px=120),
)


def row_of(one: InstanceSample) -> dict[str, Any]:
    return {
        "name": one.name,
        "role": one.role.lower(),
        "state": one.state,
        "tp": one.tp,
        "pp": one.pp,
        "host": one.host,
        "gpu": one.device,
        "queue": one.num_waiting,
        "running": one.num_running,
        "holding": one.num_holding,
        "kv": round(100 * one.kv_share, 1),
        "tokens": round(one.tokens_per_s),
        "address": one.address,
        "error": one.error,
    }


class InstancesPage(Page):
    """One row per instance."""

    title, path = "Instances", "instances"
    extensions = ("tabulator",)

    def __init__(self, feed: Feed, theme: Theme, **params: Any) -> None:
        super().__init__(feed, theme, **params)
        self._head = html_pane(theme)
        self._table = new_table(theme, _COLUMNS)
        self.cards = [Card("Instances", self._head, "full"), Card("", self._table, "full")]
        self.update()

    def update(self) -> None:
        sample = self.feed.newest
        rows = [row_of(one) for one in in_order(sample)] if sample else []
        text = (
            _summary(sample)
            if sample and rows
            else empty_text("No instances: nothing has been told of any yet.")
        )
        if self._head.object != text:
            self._head.object = text
        self._table.visible = bool(rows)
        show_rows(self._table, pd.DataFrame(rows, columns=[c.name for c in _COLUMNS]))


def _summary(sample: Sample) -> str:
    roles = {one.role for one in sample.instances}
    parts = [
        f"{sum(one.role == role for one in sample.instances)} {role.lower()}"
        for role in sorted(roles, reverse=True)
    ]
    states = [one.state for one in sample.instances if one.state != "ready"]
    away = f'; <span class="bad">{len(states)} not ready</span>' if states else ""
    model = f" of <b>{escape(sample.model)}</b>" if sample.model else ""
    return f"{', '.join(parts)} on {sample.num_gpus} GPUs{model}{away}"
