"""Jobs: how far batch jobs are, and which rows failed and why."""

from __future__ import annotations

from typing import Any

import pandas as pd
import panel as pn

from daskserve.dashboards.feed import Feed
from daskserve.dashboards.page import Card, Page, empty_text, html_pane
from daskserve.dashboards.tables import Column, new_table, show_rows
from daskserve.dashboards.theme import Theme, escape, number_text, percent_text, seconds_text
from daskserve.observe import JobProgress

_COLUMNS = (
    Column("row", "Row", "number"),
    Column("code", "Code"),
    Column("message", "Reason"),
    Column("custom_id", "custom_id"),
    Column("job", "Job", least_px=160),
)
_STATES = {"running": "running", "done": "done", "stopped": "not heard of; run it again to go on"}


class JobsPage(Page):
    """Progress of every job, the latest first, and the failed rows of all of them."""

    title, path = "Jobs", "jobs"
    extensions = ("tabulator",)

    def __init__(self, feed: Feed, theme: Theme, **params: Any) -> None:
        super().__init__(feed, theme, **params)
        self._jobs = html_pane(theme, _css(theme))
        self._none = html_pane(theme)
        self._failed = new_table(theme, _COLUMNS, max_height=560)
        failed = pn.Column(self._none, self._failed, sizing_mode="stretch_width", margin=0)
        self.cards = [
            Card("Batch jobs", self._jobs, "full"),
            Card("Failed rows", failed, "full", note="the latest 50 of each job"),
        ]
        self.update()

    def update(self) -> None:
        jobs = self.feed.jobs
        text = "".join(map(_job_html, jobs)) or empty_text(
            "No batch job has run on this service yet. daskserve run-batch -i rows.jsonl -o"
            " out.jsonl --scheduler ADDRESS shows up here."
        )
        if self._jobs.object != text:
            self._jobs.object = text
        rows = [
            {
                "job": job.name,
                "row": failed.row + 1,
                "custom_id": failed.custom_id,
                "code": failed.code,
                "message": failed.message,
            }
            for job in jobs
            for failed in job.failed_rows
        ]
        self._none.object = "" if rows else empty_text("None.")
        self._failed.visible = bool(rows)
        show_rows(self._failed, pd.DataFrame(rows, columns=[c.name for c in _COLUMNS]))


def _job_html(job: JobProgress) -> str:
    failed = f'<span class="bad">{job.num_failed:,} failed</span>' if job.num_failed else "0 failed"
    left = f"{seconds_text(job.left_s)} left" if job.left_s is not None else ""
    earlier = f"{job.num_earlier:,} from earlier runs" if job.num_earlier else ""
    facts = [
        f"{job.num_done:,} of {job.num_rows:,} rows",
        failed,
        f"{number_text(job.rows_per_s)} rows/s",
        f"{job.output_tokens:,} output tokens",
        earlier,
        left,
    ]
    kind = {"done": "good", "stopped": "bad"}.get(job.state, "muted")
    good = 100 * (job.num_done - job.num_failed) / max(job.num_rows, 1)
    bad = 100 * job.num_failed / max(job.num_rows, 1)
    return (
        f'<div class="job"><div class="head"><b>{escape(job.name)}</b>'
        f'<span class="{kind}">{_STATES[job.state]}</span>'
        f'<span class="share">{percent_text(job.share)}</span></div>'
        f'<div class="bar"><i class="done" style="width:{good:.3f}%"></i>'
        f'<i class="failed" style="width:{bad:.3f}%"></i></div>'
        f'<div class="facts">{" · ".join(filter(None, facts))}</div></div>'
    )


def _css(theme: Theme) -> str:
    return f"""
    .job {{ margin: 4px 0 18px; }}
    .head {{ display: flex; gap: 12px; align-items: baseline; flex-wrap: wrap; }}
    .head b {{ overflow-wrap: anywhere; }}
    .share {{ margin-left: auto; font-variant-numeric: tabular-nums; }}
    .bar {{ display: flex; height: 10px; border-radius: 5px; overflow: hidden; margin: 6px 0;
            background: {theme.line}; }}
    .bar i {{ display: block; }}
    .done {{ background: {theme.decode}; }} .failed {{ background: {theme.bad}; }}
    .facts {{ color: {theme.muted}; font-size: 13px; }}
    """
