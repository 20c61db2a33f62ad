"""What-if without a browser: estimates at once, refined answers only for what is still asked."""

from __future__ import annotations

import threading
import time

import pytest

from daskserve.dashboards.feed import Feed
from daskserve.dashboards.plan import PlanPage
from daskserve.dashboards.question import Question
from daskserve.dashboards.refining import Progress, Refiner
from daskserve.dashboards.sources import NoSource
from daskserve.dashboards.theme import LIGHT
from daskserve.dashboards.whatif import WhatIfPage
from daskserve.errors import ConfigError
from daskserve.planner.plan_file import read_plan, write_plan
from daskserve.planner.plan_record import PlanRecord

from .conftest import simulated


class Asked:
    """A refiner that is answered by hand."""

    def __init__(self) -> None:
        self.questions: list[tuple] = []
        self.num_dropped = 0

    def ask(self, owner, question, tell) -> None:
        self.questions.append((question, tell))

    def drop(self, owner) -> None:
        self.num_dropped += 1


@pytest.fixture
def page() -> WhatIfPage:
    page = WhatIfPage(Feed(NoSource()), LIGHT, Asked())
    yield page
    page.close()


def test_a_change_is_estimated_at_once_and_labelled(page):
    assert "estimate" in page._state.object and "2 GPUs" in page._answer.object
    page._widgets["rate"].value = 80
    page._widgets["rate"].param.trigger("value_throttled")
    page._on_change(None)
    assert "6 GPUs" in page._answer.object and page.question.rate == 80


def test_only_the_latest_question_is_refined(page):
    for rate in (30, 40, 60):
        page._widgets["rate"].value = rate
        page._on_change(None)
    deadline = time.monotonic() + 10
    while not page._refiner.questions and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    [(question, tell)] = page._refiner.questions
    assert question.rate == 60
    tell(Progress("placements are simulated", 7))
    assert "7 done" in page._state.object
    tell(simulated(question))
    assert ">plan<" in page._state.object and page.feed.plan.rate == 60


def test_a_stale_answer_is_not_shown(page):
    stale = page.question
    page._widgets["rate"].value = 40
    page._on_change(None)
    shown = page._answer.object
    page._show(stale, simulated(stale))
    assert page._answer.object == shown and "estimate" in page._state.object


def test_what_has_no_say_is_disabled(page):
    assert not page._widgets["network_gbps"].disabled
    page._widgets["num_nodes"].value = 1
    page._widgets["output_tokens"].value = 1
    page._on_change(None)
    assert page._widgets["network_gbps"].disabled and page._widgets["tpot_s"].disabled


def test_another_gpu_brings_its_price_and_errors_are_said(page):
    page._widgets["gpu"].value = "H100"
    assert page.question.price == 3.0 and "H100" in page._answer.object
    page._widgets["prompt_tokens"].value = 16384
    page._on_change(None)
    assert "cannot be planned" in page._state.object and page._answer.object == ""


def test_the_plan_page_shows_the_last_plan():
    feed = Feed(NoSource())
    page = PlanPage(feed, LIGHT)
    assert "No plan has been made" in page._head.object
    feed.note_plan(simulated(Question(model="opt-13b")))
    page.update()
    assert "because" in page._head.object and "✓" in page._ranking.object
    shares = {way: list(source.data["share"]) for way, source in page._curves.items()}
    assert shares == {"prefill, decode apart": [1.0, 0.95, 0.5], "colocated": [1.0, 0.9, 0.2]}
    assert page._target.location == 0.9 and list(page._front["colocated"].data["gpus"]) == [1, 2, 3]


def test_a_plan_survives_its_file(tmp_path):
    plan, path = simulated(Question()), tmp_path / "plan.json"
    write_plan(plan, path)
    assert read_plan(path) == plan
    for text in ("{", "[]", '{"daskserve_plan": 2}', '{"daskserve_plan": 1}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=str(path)):
            read_plan(path)


@pytest.mark.slow
def test_plans_are_made_in_another_process_kept_and_given_up():
    refiner = Refiner()
    try:
        news: list = []
        done = threading.Event()

        def tell(one) -> None:
            news.append(one)
            if not isinstance(one, Progress):
                done.set()

        small = {"num_nodes": 1, "gpus_per_node": 4}
        refiner.ask("me", Question(rate=9.0, **small), lambda one: news.append("stale"))
        time.sleep(0.5)
        refiner.ask("me", Question(rate=10.0, **small), tell)
        assert done.wait(100)
        plan = news[-1]
        assert isinstance(plan, PlanRecord) and plan.rate == 10.0 and plan.chosen is not None
        assert any(isinstance(one, Progress) for one in news)
        done.clear()
        refiner.ask("me", Question(rate=10.0, **small), tell)
        assert done.is_set() and news[-1] is plan
    finally:
        refiner.close()
