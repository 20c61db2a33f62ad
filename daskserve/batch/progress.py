"""How a running job shows where it is: one live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import AbstractContextManager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from daskserve.batch.summary import Tally, seconds_text

_WINDOW_S = 30.0
_SAMPLE_S = 0.25


class ProgressView(AbstractContextManager["ProgressView"]):
    """Rows done and failed, tokens per second, TTFT and TPOT medians, time left.

    Parameters
    ----------
    tally
        The job's counters; read, never changed.
    num_rows
        Rows of the job.
    interval_s
        Seconds between two plain lines.
    is_shown
        False keeps silent.
    stream
        Where to write, standard error by default; a terminal gets the live line.
    """

    def __init__(
        self,
        tally: Tally,
        num_rows: int,
        interval_s: float,
        is_shown: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        stream = stream or sys.stderr
        self._tally, self._num_rows, self._interval_s = tally, num_rows, interval_s
        self._stream, self._is_shown = stream, is_shown
        now = time.monotonic()
        self._shown_at = now
        # (time, rows, output tokens) of the last seconds: rates follow what happens now.
        self._samples = deque([(now, tally.num_rows, tally.output_tokens)])
        self._bar: Progress | None = None
        if is_shown and stream is not None and stream.isatty():
            self._bar = Progress(
                BarColumn(bar_width=8),
                TextColumn("{task.description}", table_column=Column(no_wrap=True)),
                console=Console(file=stream),
            )
            self._task = self._bar.add_task("", total=num_rows, completed=tally.num_rows)

    def __enter__(self) -> ProgressView:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.update(final=True)
        if self._bar is not None:
            self._bar.stop()

    def update(self, final: bool = False) -> None:
        """Take a sample and show it when it is time to; cheap enough for every row."""
        now = time.monotonic()
        if not final and now - self._samples[-1][0] < _SAMPLE_S:
            return
        self._samples.append((now, self._tally.num_rows, self._tally.output_tokens))
        while now - self._samples[0][0] > _WINDOW_S and len(self._samples) > 2:
            self._samples.popleft()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._tally.num_rows, description=self.text())
        elif self._is_shown and (final or now - self._shown_at >= self._interval_s):
            self._shown_at = now
            print(self.text(), file=self._stream)

    def text(self) -> str:
        """Where the job is, in one line beside the bar; TTFT and TPOT are medians."""
        tally = self._tally
        (then, rows, tokens), (now, rows_now, tokens_now) = self._samples[0], self._samples[-1]
        span_s = max(now - then, 1e-9)
        rows_per_s = (rows_now - rows) / span_s
        left = self._num_rows - tally.num_rows
        eta = f"{left / rows_per_s:.0f} s" if rows_per_s > 0 else "-"
        failed = f", {tally.num_failed} failed" if tally.num_failed else ""
        return (
            f"{tally.num_rows}/{self._num_rows} rows{failed}, "
            f"{(tokens_now - tokens) / span_s:.0f} tok/s, "
            f"TTFT {seconds_text(tally.ttft.percentile(0.5))}, "
            f"TPOT {seconds_text(tally.tpot.percentile(0.5))}, ETA {eta}"
        )
