"""What takes longer in a browser: simulated plans, many sessions, the real command line, pictures.

Pictures go to out/screenshots, which is not kept in the repository.
"""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from daskserve import SamplingParams
from daskserve.dashboards.app import Dashboard

from .browser import Tab, dashboard, server_with_dashboard
from .conftest import mock_service

pytestmark = [pytest.mark.ui, pytest.mark.slow, pytest.mark.timeout(600)]
PAGES = [kind.path for kind, _ in Dashboard(None).pages]
PICTURES = Path(__file__).parents[2] / "out" / "screenshots"


def test_a_slider_changes_the_estimate_and_a_plan_replaces_it(live, tab):
    tab.open(live, "whatif")
    assert "at 20.0 req/s" in tab.text
    tab.page.locator(".noUi-handle").first.focus()
    for _ in range(4):  # 30, 40, 60, 80
        tab.page.keyboard.press("ArrowRight")
    tab.until(lambda: "at 80.0 req/s" in tab.text)
    tab.until(lambda: "simulated; curves" in tab.text, 240)
    assert "80 req/s of 512" in tab.open(live, "plan").text


def test_ten_sessions_at_once(live, chromium):
    tabs = [Tab(chromium).open(live, PAGES[i % 2]) for i in range(10)]
    drawn = [tab for i, tab in enumerate(tabs) if i % 2 == 0]
    for one, length in [(one, len(one.column("time"))) for one in drawn]:
        one.until(lambda one=one, length=length: len(one.column("time")) > length, 60)
    assert [tab.troubles for tab in tabs] == [[]] * 10
    for tab in tabs:
        tab.close()


def test_the_commands_themselves(chromium, tmp_path):
    """``serve --dashboard``, and ``dashboard --server`` of the same server."""
    given = ("--model", "mock", "--slo-ttft", "250ms", "--slo-tpot", "50ms")
    with (
        server_with_dashboard(*given, "--state-dir", tmp_path / "state") as (url, beside),
        dashboard("--server", url) as other,
    ):
        tabs = [Tab(chromium).open(address, "live") for address in (beside, other)]
        asked = {"model": "mock", "prompt": "some words", "max_tokens": 8}
        with httpx.Client(base_url=url, timeout=60) as http:
            for _ in range(40):
                assert http.post("/v1/completions", json=asked).status_code == 200
        for tab in tabs:
            tab.until(lambda tab=tab: any(v == v and v > 0 for v in tab.column("ttft_p50")))
            length = len(tab.column("time"))
            tab.until(lambda tab=tab, length=length: len(tab.column("time")) > length)
            assert "TTFT 250 ms, TPOT 50.0 ms" in tab.text and tab.troubles == []
            tab.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 700])
def test_pictures(recorded, chromium, theme, width):
    PICTURES.mkdir(parents=True, exist_ok=True)
    tab = Tab(chromium, theme, width)
    for name in PAGES:
        tab.open(recorded, name)
        time.sleep(0.5)
        tab.page.screenshot(path=PICTURES / f"{name}-{theme}-{width}.png", full_page=True)
        body, window = tab.page.evaluate(
            "[document.documentElement.scrollWidth, window.innerWidth]"
        )
        assert body <= window, f"{name} scrolls sideways"
    assert tab.troubles == []
    tab.close()


def test_the_picture_of_the_readme(chromium):
    """Real load; a burst violates the SLO. docs/dashboard.png is a copy of what comes out."""
    limits = ("--slo-ttft", "150ms", "--slo-tpot", "50ms", "--window", "5")
    with mock_service(prefill=2, decode=2) as service:
        with dashboard("--scheduler", service.client.scheduler.address, *limits) as address:
            tab = Tab(chromium, "light", 1400, 1070).open(address, "live")
            for second in range(90):
                number = 400 if 45 <= second < 55 else 6 + second % 5
                params = SamplingParams(max_tokens=16)
                futures = service.map(["some words of a prompt"] * number, params)
                tab.page.wait_for_timeout(900)
                service.client.gather(futures)
            limit, over = tab.column("ttft_limit"), tab.column("ttft_over")
            assert any(a > b for a, b in zip(over, limit, strict=True))
            PICTURES.mkdir(parents=True, exist_ok=True)
            tab.page.screenshot(path=PICTURES / "readme.png")
            tab.close()
    assert (PICTURES / "readme.png").stat().st_size < 250_000
