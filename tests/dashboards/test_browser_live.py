"""The dashboard of a running service in a real browser, and pictures for people to look at.

Pictures go to out/screenshots, which is not kept in the repository.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daskserve import EngineConfig, SamplingParams, Service
from daskserve.core.instance import Role
from daskserve.core.slo import SLO
from daskserve.dashboards.app import Dashboard
from daskserve.observe import Observation
from daskserve.replanning.decision import Action, Decision, Evidence, Kind, Prediction, Trigger
from daskserve.replanning.split import Split

from .browser import Tab, browser, dashboard
from .conftest import hostile_job, sample_at

pytestmark = [pytest.mark.ui, pytest.mark.slow, pytest.mark.timeout(600)]
PAGES = [kind.path for kind, _ in Dashboard(None).pages]
PICTURES = Path(__file__).parents[2] / "out" / "screenshots"


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    with browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    config = EngineConfig(model="mock", mock_prefill_s=0.004, mock_decode_s=0.004)
    with Service.local(prefill=1, decode=1, config=config, slo=SLO(0.5, 0.1)) as service:
        yield service


@pytest.fixture(scope="module")
def address(service: Service) -> Iterator[str]:
    with dashboard("--scheduler", service.client.scheduler.address, "--window", "5") as address:
        yield address


def decision(number: int, **changes) -> Decision:
    given = {
        "trigger": Trigger.DRIFT,
        "reason": f"prompts grew, decision {number}",
        "evidence": (Evidence("prompt_tokens", 512, 940, 9.1, 5.0),),
        "actions": (Action(Kind.FLIP, Role.PREFILL, "tcp://10.0.0.3:4000"),),
        "before": Prediction(Split.parse("4P4D"), 17.2, 0.81),
        "after": Prediction(Split.parse("5P3D"), 22.9, 0.94),
        "gain_rps": 5.7,
    }
    return Decision(number, time.time(), **{**given, **changes})


def until(condition: Callable[[], bool], within_s: float) -> float:
    """Seconds that it took."""
    started_at = time.monotonic()
    while not condition():
        assert time.monotonic() - started_at < within_s, "it did not happen in time"
        time.sleep(0.1)
    return time.monotonic() - started_at


def test_numbers_move_under_load(service, address, chromium):
    tab = Tab(chromium).open(address, "live")
    until(lambda: len(tab.column("time")) > 2, 30)
    before = len(tab.column("time"))
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            service.client.gather(service.map(["some words"] * 5, SamplingParams(max_tokens=8)))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        until(lambda: any(v == v and v > 0 for v in tab.column("ttft_p50")), 60)
        until(lambda: len(tab.column("time")) >= before + 5, 60)
    finally:
        stop.set()
        thread.join()
    assert "$" in tab.text and "of mock" in tab.open(address, "instances").text.replace("  ", " ")
    assert tab.troubles == []
    tab.close()


def test_a_replan_appears_within_five_seconds_and_shows_its_evidence(service, address, chromium):
    tab = Tab(chromium).open(address, "replans")
    note = service._connection.note_decision
    service.client.sync(note, decision(1).to_json())
    took_s = until(lambda: "decision 1" in tab.text, 60)
    assert took_s < 5.0
    later = decision(2, reason="no change, because it would not pay", actions=())
    service.client.sync(note, later.to_json())
    until(lambda: "would not pay" in tab.text, 20)
    tab.page.get_by_text("prompts grew, decision 1").first.click()
    until(lambda: "flip prefill" in tab.text, 20)
    assert tab.troubles == []
    tab.close()


def test_a_slider_changes_the_estimate_and_a_plan_replaces_it(address, chromium):
    tab = Tab(chromium).open(address, "whatif")
    until(lambda: "estimate" in tab.text, 30)
    assert "at 20.0 req/s" in tab.text
    tab.page.locator(".noUi-handle").first.focus()
    for _ in range(4):  # 30, 40, 60, 80
        tab.page.keyboard.press("ArrowRight")
    until(lambda: "at 80.0 req/s" in tab.text, 30)
    until(lambda: "simulated; curves" in tab.text, 240)
    tab.open(address, "plan")
    assert "80 req/s of 512" in tab.text and tab.troubles == []
    tab.close()


def test_ten_sessions_at_once(address, chromium):
    tabs = [Tab(chromium).open(address, PAGES[i % 2]) for i in range(10)]
    live = [tab for i, tab in enumerate(tabs) if i % 2 == 0]
    lengths = [len(tab.column("time")) for tab in live]
    until(lambda: all(len(t.column("time")) > n for t, n in zip(live, lengths, strict=True)), 60)
    assert [tab.troubles for tab in tabs] == [[]] * 10
    for tab in tabs:
        tab.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 700])
def test_pictures(record, chromium, theme, width):
    shown = [Observation(sample_at(second)) for second in range(240)]
    told = (decision(1).to_json(), decision(2, reason="no change, because", actions=()).to_json())
    path = record(*shown, Observation(sample_at(240), (hostile_job(),), told))
    PICTURES.mkdir(parents=True, exist_ok=True)
    with dashboard(path) as address:
        tab = Tab(chromium, theme, width)
        for name in PAGES:
            tab.open(address, name)
            time.sleep(0.5)
            tab.page.screenshot(path=PICTURES / f"{name}-{theme}-{width}.png", full_page=True)
            body, window = tab.page.evaluate(
                "[document.documentElement.scrollWidth, window.innerWidth]"
            )
            assert body <= window, f"{name} scrolls sideways"
        assert tab.troubles == []
        tab.close()
