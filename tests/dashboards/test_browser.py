"""Pages in a real browser, over a recording and of a running service."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from daskserve import SamplingParams
from daskserve.dashboards.app import Dashboard

from .browser import Tab
from .conftest import HOSTILE, decision

pytestmark = pytest.mark.ui
PAGES = [kind.path for kind, _ in Dashboard(None).pages]


def click_an_earlier_look(tab: Tab) -> None:
    assert "figure 2" in tab.text
    tab.page.get_by_text("prompts grew, decision 1").first.click()
    tab.until(lambda: "figure 1" in tab.text and "flip prefill" in tab.text)


def show_a_longer_time(tab: Tab) -> None:
    assert len(tab.column("ttft_p50")) == 301
    tab.page.get_by_text("15 min").click()
    tab.until(lambda: len(tab.column("ttft_p50")) > 301)


def move_a_slider(tab: Tab) -> None:
    assert "at 20.0 req/s" in tab.text
    tab.page.locator(".noUi-handle").first.focus()
    tab.page.keyboard.press("ArrowRight")
    tab.until(lambda: "at 30.0 req/s" in tab.text)


CLICKS = {
    "replans": click_an_earlier_look,
    "live": show_a_longer_time,
    "whatif": move_a_slider,
}


def test_every_page_loads_and_answers_clicks_and_hostile_names_stay_text(recorded, tab):
    seen = ""
    for name in PAGES:
        seen += tab.open(recorded, name).text
        CLICKS.get(name, lambda tab: None)(tab)
    assert tab.page.evaluate("window.hacked") is None
    assert HOSTILE in seen and "Time to first token" in seen and "decode-3" in seen


@contextmanager
def load(service) -> Iterator[None]:
    """Requests, one handful after another."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            service.client.gather(service.map(["some words"] * 5, SamplingParams(max_tokens=8)))
            stop.wait(0.1)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_every_live_page_loads_and_numbers_move_under_load(service, live, tab):
    for name in ("plan", "whatif", "jobs", "live"):  # and two more below
        tab.open(live, name)
    before = len(tab.column("time"))
    with load(service):
        tab.until(lambda: any(v == v and v > 0 for v in tab.column("ttft_p50")))
        tab.until(lambda: len(tab.column("time")) >= before + 3)
    assert "$" in tab.text and "of mock" in " ".join(tab.open(live, "instances").text.split())


def test_a_replan_appears_within_five_seconds_and_shows_its_evidence(service, live, tab):
    tab.open(live, "replans")
    note = service._connection.note_decision
    noted_at = time.monotonic()
    service.client.sync(note, decision(1).to_json())
    tab.until(lambda: "decision 1" in tab.text)
    assert time.monotonic() - noted_at < 5.0
    tab.until(lambda: "flip prefill" in tab.text)
