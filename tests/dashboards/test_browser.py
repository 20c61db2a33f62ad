"""Pages in a real browser."""

from __future__ import annotations

import pytest

from daskserve.dashboards.app import Dashboard
from daskserve.observe import Observation
from daskserve.replanning.decision import Decision, Evidence, Trigger

from .browser import Tab, browser, dashboard
from .conftest import HOSTILE, STARTED_AT, hostile_job, sample_at

pytestmark = pytest.mark.ui
PAGES = [kind.path for kind, _ in Dashboard(None).pages]


def test_every_page_loads_and_hostile_names_stay_text(record):
    instance = sample_at(0).instances[0]
    named = [
        Observation(sample_at(second, model=HOSTILE), (hostile_job(),)) for second in range(40)
    ]
    path = record(*named)
    assert instance.name in path.read_text()
    with dashboard(path) as address, browser() as chromium:
        tab = Tab(chromium)
        seen = ""
        for name in PAGES:
            seen += tab.open(address, name).text
        assert tab.page.evaluate("window.hacked") is None
        assert tab.troubles == []
    assert HOSTILE in seen and "Time to first token" in seen and "decode-3" in seen


def test_what_is_clicked_changes_what_is_shown(record):
    rows = [Observation(sample_at(second)) for second in range(400)]
    looks = []
    for n in (1, 2):
        evidence = (Evidence(f"figure {n}", 1, 2, 3, 4),)
        looks.append(Decision(n, STARTED_AT + n, Trigger.DRIFT, f"look {n}", evidence).to_json())
    path = record(*rows, Observation(sample_at(400), (), tuple(looks)))
    with dashboard(path) as address, browser() as chromium:
        tab = Tab(chromium).open(address, "replans")
        assert "figure 2" in tab.text
        tab.page.get_by_text("look 1").first.click()
        tab.until(lambda: "figure 1" in tab.text)
        tab.open(address, "live")
        assert len(tab.column("ttft_p50")) == 301
        tab.page.get_by_text("15 min").click()
        tab.until(lambda: len(tab.column("ttft_p50")) > 301)
        tab.open(address, "whatif")
        assert "at 20.0 req/s" in tab.text
        tab.page.locator(".noUi-handle").first.focus()
        tab.page.keyboard.press("ArrowRight")
        tab.until(lambda: "at 30.0 req/s" in tab.text)
        assert tab.troubles == []
