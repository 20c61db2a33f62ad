"""What the dashboard costs and how quick it is: mock instances under load, a browser before it.

Eight mock instances (four prefill, four decode) and streams at 200 requests/s, the cheapest real
way through the service; on a small machine fewer get through, and what did is printed. Every
answer is counted where it ends, so the dashboard sees the same traffic that clients do. They
have a lower priority than the dashboard, which shares the machine with them here only. The
dashboard is a process of its own with one browser session on its Live page.

1. First paint: from the call for the Live page to its first drawn chart.
2. Seconds between two updates in the browser, over the time of measurement.
3. CPU time of the dashboard process in that time, as a share of one core.
4. What-if for OPT-13B on 32 GPUs: from a key on a slider to the estimate, and to the plan.

With --part whatif only the last one, without a service. The last line is a JSON list of
{"name", "value", "unit", "target", "ok"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import psutil
from playwright.sync_api import Page, sync_playwright

from daskserve import EngineConfig, SamplingParams, Service
from daskserve.core.slo import SLO
from daskserve.errors import DaskserveError

NUM_INSTANCES = 8
RATE_PER_S = 200.0
TARGETS = {"first paint": 3.0, "update interval": 1.2, "CPU share": 0.2, "estimate": 1.0}
IDLE = "window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle"
COUNT_UPDATES = """() => {
  window.updates = [];
  const source = [...Bokeh.documents[0]._all_models.values()].find(
    model => model.type === "ColumnDataSource" && "ttft_p50" in
      (model.data instanceof Map ? Object.fromEntries(model.data) : model.data));
  source.streaming.connect(() => window.updates.push(performance.now() / 1000));
}"""
READ_ALL = """() => {
  const read = node => [...node.childNodes].map(child => child.nodeType === 3 ? child.textContent
    : read(child) + (child.shadowRoot ? read(child.shadowRoot) : "")).join(" ");
  return read(document.body);
}"""


class Load:
    """Streams at a steady rate from a process of its own, as clients and service are elsewhere."""

    def __init__(self, num_instances: int, rate_per_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._done = context.Value("l", 0)
        self._port, other = context.Pipe()
        self._process = context.Process(
            target=_offer, args=(num_instances, rate_per_s, self._done, other)
        )
        self.address = ""

    @property
    def num_done(self) -> int:
        return self._done.value

    def __enter__(self) -> Load:
        self._process.start()
        if not self._port.poll(600):
            raise SystemExit("the service did not start")
        self.address = self._port.recv()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._port.send("over")
        self._process.join(60)


def _offer(num_instances: int, rate_per_s: float, done: Any, port: Any) -> None:
    # Service and clients have machines of their own elsewhere; here they take what dashboard and
    # browser leave of the cores.
    os.nice(10)
    asyncio.run(_stream_on(num_instances, rate_per_s, done, port))


async def _stream_on(num_instances: int, rate_per_s: float, done: Any, port: Any) -> None:
    config = EngineConfig(model="mock", mock_prefill_s=0.005, mock_decode_s=0.01)
    half = num_instances // 2
    async with Service.local(
        prefill=half, decode=num_instances - half, config=config, cores=None,
        slo=SLO(0.5, 0.1), asynchronous=True,
    ) as service:  # fmt: skip
        port.send(service.client.scheduler.address)
        open_: set[asyncio.Task[None]] = set()
        due_at = time.monotonic()
        while not port.poll():
            due_at += 1 / rate_per_s
            await asyncio.sleep(max(due_at - time.monotonic(), 0))
            if len(open_) < 2 * rate_per_s:  # what does not get through is not offered
                task = asyncio.create_task(_one(service, done))
                open_.add(task)
                task.add_done_callback(open_.discard)
        for task in open_:
            task.cancel()


async def _one(service: Service, done: Any) -> None:
    try:
        async for _ in service.stream([5] * 32, SamplingParams(max_tokens=2)):
            pass
        done.value += 1
    except DaskserveError:
        pass


@contextmanager
def dashboard(*arguments: str) -> Iterator[tuple[str, psutil.Process]]:
    """Its address and process."""
    command = [sys.executable, "-m", "daskserve.cli", "dashboard", "--port", "0", "--until-eof"]
    with subprocess.Popen(
        [*command, *arguments], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None and process.stdin is not None
        try:
            for line in process.stderr:
                if found := re.search(r"dashboard on (http://\S+)/", line):
                    yield found[1], psutil.Process(process.pid)
                    return
            raise SystemExit("the dashboard did not start")
        finally:
            process.stdin.close()
            process.kill()


def first_paint_s(page: Page, address: str) -> float:
    started_at = time.monotonic()
    page.goto(f"{address}/live")
    page.wait_for_function(IDLE)
    return time.monotonic() - started_at


def watched(page: Page, process: psutil.Process, seconds: float) -> tuple[list[float], float]:
    """Seconds between updates, and the process's share of a core."""
    page.evaluate(COUNT_UPDATES)
    before, started_at = process.cpu_times(), time.monotonic()
    page.wait_for_timeout(seconds * 1000)
    after, took_s = process.cpu_times(), time.monotonic() - started_at
    times = page.evaluate("window.updates")
    used_s = after.user + after.system - before.user - before.system
    return [later - earlier for earlier, later in pairwise(times)], used_s / took_s


def answered_rate(page: Page) -> str:
    """The rate that the shown answer is for, not the one that the slider stands at."""
    found = re.search(r"million tokens at ([\d.,]+) req/s", page.evaluate(READ_ALL))
    return found[1] if found else ""


def asked(page: Page, address: str, num_moves: int) -> tuple[list[float], float]:
    """Seconds to each estimate, and to the plan of the last one."""
    page.goto(f"{address}/whatif")
    page.wait_for_function(IDLE)
    waits = []
    handle = page.locator(".noUi-handle").first
    handle.focus()
    for move in range(num_moves):
        shown = answered_rate(page)
        started_at = time.monotonic()
        page.keyboard.press("ArrowRight" if move % 4 < 2 else "ArrowLeft")
        while answered_rate(page) == shown:
            if time.monotonic() - started_at > 60:
                raise SystemExit("no estimate came")
        waits.append(time.monotonic() - started_at)
        time.sleep(0.3)
    started_at = time.monotonic()
    while "simulated; curves" not in page.evaluate(READ_ALL):
        if time.monotonic() - started_at > 400:
            raise SystemExit("no plan came")
        time.sleep(0.1)
    return waits, time.monotonic() - started_at


def row(name: str, value: float, unit: str, target: float | None) -> dict[str, Any]:
    is_ok = target is None or value <= target
    print(f"{name}: {value:.3g} {unit}" + ("" if target is None else f" (at most {target:g})"))
    return {"name": name, "value": value, "unit": unit, "target": target, "ok": is_ok}


def live_rows(page: Page, seconds: float, rate_per_s: float) -> Iterator[dict[str, Any]]:
    with (
        Load(NUM_INSTANCES, rate_per_s) as load,
        dashboard("--scheduler", load.address) as (address, process),
    ):
        page.goto(f"{address}/instances")  # the browser's cache as on any but the first visit
        page.wait_for_function(IDLE)
        paint_s = first_paint_s(page, address)
        done, started_at = load.num_done, time.monotonic()
        intervals, share = watched(page, process, seconds)
        rate = (load.num_done - done) / (time.monotonic() - started_at)
    print(f"{NUM_INSTANCES} mock instances, {rate:.0f} of {rate_per_s:.0f} requests/s got through")
    yield row("dashboard: first paint", paint_s, "s", TARGETS["first paint"])
    median_s = statistics.median(intervals) if intervals else seconds
    yield row("dashboard: seconds between updates, p50", median_s, "s", TARGETS["update interval"])
    yield row("dashboard: CPU of its process", share, "cores", TARGETS["CPU share"])
    yield row("dashboard: requests/s while measured", rate, "1/s", None)


def whatif_rows(page: Page, num_moves: int) -> Iterator[dict[str, Any]]:
    with dashboard() as (address, _):
        waits, plan_s = asked(page, address, num_moves)
    estimate_s = statistics.median(waits)
    yield row("dashboard: what-if estimate, p50", estimate_s, "s", TARGETS["estimate"])
    yield row("dashboard: the plan replaces it after", plan_s, "s", None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="15 s of measurement, 6 moves")
    parser.add_argument("--part", choices=("live", "whatif"), help="only one of the two")
    parser.add_argument("--rate", type=float, default=RATE_PER_S, help="requests/s offered")
    given = parser.parse_args()
    rows = []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-dev-shm-usage"],
        )
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(120_000)
        if given.part != "whatif":
            rows += live_rows(page, 15 if given.quick else 90, given.rate)
        if given.part != "live":
            rows += whatif_rows(page, 6 if given.quick else 20)
        chromium.close()
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
