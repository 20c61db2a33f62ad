from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.planner.workload import Workload
from daskserve.replanning.choosing import ChoiceSettings, Chooser, Look
from daskserve.replanning.decision import Kind, Outcome, Prediction, Status, Trigger
from daskserve.replanning.fast_path import FastPath, FastPathSettings
from daskserve.replanning.observation import InstanceView, Observation, RoleLoad
from daskserve.replanning.policy import Policy
from daskserve.replanning.profile import Served, WorkloadProfile
from daskserve.replanning.split import Split

SLO_ = SLO(1.0, 0.1)


class Told:
    """A planner with fixed answers, 1 request/s for any other split."""

    def __init__(self, **goodput_rps: float) -> None:
        self.goodput_rps = goodput_rps
        self.num_asked = 0

    def predict(self, history, splits, rate_rps):
        self.num_asked += 1
        return [Prediction(s, self.goodput_rps.get(str(s), 1.0), 0.5) for s in splits]


def seen(num_prefill: int, num_decode: int, **changes) -> Observation:
    roles = [Role.PREFILL] * num_prefill + [Role.DECODE] * num_decode
    views = tuple(InstanceView(str(i), role, num_running=i % 3) for i, role in enumerate(roles))
    return replace(Observation(views), **changes)


def chosen(planner: Told, observation: Observation, rate_rps: float, least_gain: float = 0.05):
    profile = WorkloadProfile()
    profile.saw(0.0, 0, 0, [])
    ended = [Served(i, i + 1.0, 100, 10, 0.1, 0.05, True) for i in range(10)]
    profile.saw(10.0, round(10 * rate_rps), 0, ended)
    look = Look(
        Trigger.DRIFT,
        Workload.uniform(100, 5.0, 100, 10),
        profile.statistics(10.0, 10.0),
        rate_rps,
        observation,
        least_gain,
    )
    return Chooser(planner, SLO_, ChoiceSettings()).choose(look)


def test_the_best_split_is_reached_by_flips_of_the_idlest_instances():
    decision = chosen(Told(**{"4P2D": 5, "2P4D": 10}), seen(4, 2), 8.0)
    assert [a.kind for a in decision.actions] == [Kind.FLIP, Kind.FLIP]
    assert {a.role for a in decision.actions} == {Role.DECODE}
    assert [a.instance for a in decision.actions] == ["0", "3"]
    assert decision.gain_rps == 5 and decision.switching_requests > 0
    assert (decision.before.split, decision.after.split) == (Split(4, 2), Split(2, 4))


@pytest.mark.parametrize(
    ("goodput", "rate_rps", "why"),
    [
        ({"3P3D": 10, "2P4D": 12}, 5.0, "3P3D carries 2 times the load"),
        ({"3P3D": 10, "2P4D": 10.3}, 12.0, "2P4D would win 3.0%, less than the 5%"),
        ({"3P3D": 10}, 9.0, "3P3D is the best split of 6 instances"),
        ({"3P3D": 10}, 20.0, "too few for 20 requests/s, and this cluster cannot add instances"),
    ],
)
def test_no_change_says_why(goodput, rate_rps, why):
    decision = chosen(Told(**goodput), seen(3, 3), rate_rps)
    assert not decision.is_change
    assert decision.reason.startswith("no change, because ") and why in decision.reason


def test_an_instance_is_added_where_no_split_carries_the_load():
    decision = chosen(Told(**{"3P3D": 10, "3P4D": 14}), seen(3, 3, can_add=2), 12.0)
    assert [(a.kind, a.role) for a in decision.actions] == [(Kind.ADD, Role.DECODE)]
    assert decision.after.split == Split(3, 4)


def test_an_instance_is_removed_where_the_rest_carries_the_load_with_ease():
    planner = Told(**{"3P3D": 20, "2P3D": 12})
    decision = chosen(planner, seen(3, 3, can_remove=True), 5.0)
    assert [(a.kind, a.role) for a in decision.actions] == [(Kind.REMOVE, Role.PREFILL)]
    assert not chosen(planner, seen(3, 3, can_remove=True), 7.0).is_change
    assert not chosen(planner, seen(3, 3), 5.0).is_change


class Drive:
    """Feeds a policy one second after the other."""

    def __init__(self, planner: Told, **given) -> None:
        ids = count(1)
        self.policy = Policy(planner, SLO_, lambda: next(ids), **given)
        self.observation = seen(4, 2)
        self.now_s, self._arrived = 0.0, 0
        self._rng = np.random.default_rng(0)
        self.is_busy = False

    def run(self, seconds: int, prompt: int, rate: int = 8, carry_out: bool = True) -> list:
        found = []
        for _ in range(seconds):
            self.now_s += 1.0
            self._arrived += rate
            lengths = self._rng.lognormal(np.log(prompt), 0.5, rate).astype(int) + 1
            now_s = self.now_s
            ended = [Served(now_s - 1, now_s, int(n), 10, 0.1, 0.05, True) for n in lengths]
            self.policy.saw(now_s, self._arrived, 0, ended)
            decision = self.policy.decide(now_s, now_s, self.observation)
            if decision is None:
                continue
            found.append(decision)
            if decision.is_change and carry_out and not decision.is_dry_run:
                self.policy.ended(now_s, decision, Outcome(Status.DONE))
                to_prefill = sum(1 if a.role is Role.PREFILL else -1 for a in decision.actions)
                split = self.observation.split
                self.observation = seen(
                    split.num_prefill + to_prefill, split.num_decode - to_prefill
                )
        return found


def test_steady_traffic_never_asks_the_planner():
    planner = Told()
    assert Drive(planner).run(600, 100) == [] and planner.num_asked == 0


def test_a_change_is_decided_within_a_minute_and_reviewed_later():
    drive = Drive(Told(**{"4P2D": 5, "2P4D": 10}))
    drive.run(200, 500)
    decision, review = drive.run(120, 100)
    assert decision.trigger is Trigger.DRIFT and decision.is_change
    assert decision.at_unix_s <= 200 + 60 and decision.evidence[0].name == "prompt_tokens"
    assert review.trigger is Trigger.REVIEW


def test_never_two_at_once():
    drive = Drive(Told(**{"4P2D": 5, "2P4D": 10}))
    drive.run(200, 500)
    found = drive.run(400, 100, carry_out=False)
    assert len(found) == 1
    drive.policy.ask(Split(3, 3))
    assert drive.run(10, 100) == []
    drive.policy.ended(drive.now_s, found[0], Outcome(Status.FAILED))
    assert drive.run(2, 100)[0].trigger is Trigger.MANUAL
    drive.observation = replace(drive.observation, is_busy=True)
    drive.policy.ask(Split(3, 3))
    assert drive.run(10, 100) == []


def test_a_dry_run_says_so_and_asks_no_one_to_act():
    drive = Drive(Told(**{"4P2D": 5, "2P4D": 10}), is_dry_run=True)
    drive.run(200, 500)
    decision = drive.run(60, 100)[0]
    assert decision.is_dry_run and decision.outcome.status is Status.DRY_RUN


def test_by_hand_any_split_of_the_same_size_can_be_had():
    drive = Drive(Told())
    drive.policy.ask(Split(1, 5))
    (decision,) = drive.run(1, 100)
    assert decision.trigger is Trigger.MANUAL and len(decision.actions) == 3
    assert drive.observation.split == Split(1, 5)
    drive.policy.ask(Split(1, 1))
    (decision,) = drive.run(1, 100)
    assert "cannot stop" in decision.reason and not decision.is_change


def test_by_hand_another_size_or_parallelism_starts_first_and_stops_then():
    drive = Drive(Told())
    drive.policy.ask(Split(4, 3))
    (decision,) = drive.run(1, 100)
    assert decision.reason == "no change, because this cluster cannot add instances"
    drive.observation = seen(4, 2, can_add=4, can_remove=True)
    drive.policy.ask(Split(3, 3))
    (decision,) = drive.run(1, 100)
    assert {a.kind for a in decision.actions} == {Kind.FLIP}
    drive.observation = seen(4, 2, can_add=4, can_remove=True)
    drive.policy.ask(Split(3, 4))
    (decision,) = drive.run(1, 100, carry_out=False)
    assert [a.kind for a in decision.actions] == [Kind.ADD, Kind.ADD, Kind.REMOVE]
    drive.policy.ended(drive.now_s, decision, Outcome(Status.DONE))
    drive.policy.ask(Split(1, 1, Parallelism(2, 1)))
    (decision,) = drive.run(1, 100, carry_out=False)
    kinds = [a.kind for a in decision.actions]
    assert kinds == [Kind.ADD] * 2 + [Kind.REMOVE] * 6
    assert decision.actions[0].shape == Parallelism(2, 1)


# The fast path.

STARVED = {"decode": RoleLoad(20, 16, 16), "prefill": RoleLoad(0, 1, 0)}


def test_a_queue_that_lasts_calls_for_a_flip_and_one_that_passes_does_not():
    fast = FastPath(FastPathSettings(patience_s=2.0))
    assert fast.look(0.0, seen(4, 2, **STARVED)) is None
    assert fast.look(1.0, seen(4, 2)) is None
    assert fast.look(2.0, seen(4, 2, **STARVED)) is None
    assert fast.look(3.9, seen(4, 2, **STARVED)) is None
    starved = fast.look(4.0, seen(4, 2, **STARVED))
    assert starved.role is Role.DECODE and starved.evidence.now == 10


def test_a_role_without_an_instance_to_spare_gives_none():
    fast = FastPath(FastPathSettings(patience_s=0.0))
    busy = {**STARVED, "prefill": RoleLoad(0, 8, 0)}
    assert fast.look(0.0, seen(4, 2, **busy)) is None
    assert fast.look(1.0, seen(1, 5, **STARVED)) is None
    prompts = {"prefill": RoleLoad(40, 40, 0), "decode": RoleLoad(0, 3, 40)}
    assert fast.look(2.0, seen(2, 4, **prompts)).role is Role.PREFILL


def test_flips_back_and_forth_are_ever_further_apart():
    fast = FastPath(FastPathSettings(patience_s=0.0, cool_down_s=10.0))
    prompts = {"prefill": RoleLoad(40, 40, 0), "decode": RoleLoad(0, 3, 40)}
    now_s, flips_s = 0.0, []
    while now_s < 1000:
        load = STARVED if len(flips_s) % 2 else prompts
        starved = fast.look(now_s, seen(3, 3, **load))
        if starved is not None:
            flips_s.append(now_s)
            fast.flipped(now_s, starved.role)
        now_s += 1.0
    gaps = np.diff(flips_s)
    assert len(flips_s) < 10 and (gaps[1:] >= gaps[:-1]).all() and gaps[-1] >= 160
