"""The replanner at work on a service whose instances can flip."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import Client, Scheduler, SpecCluster, Worker

from daskserve import SamplingParams, Service
from daskserve.core.instance import InstanceLoad, Role
from daskserve.core.request import Timeline
from daskserve.core.slo import SLO
from daskserve.errors import ClusterError, ConfigError
from daskserve.observe import Finished, InstanceFigures, Snapshot
from daskserve.replanning.decision import Kind, Prediction, Status, Trigger
from daskserve.replanning.policy import Policy
from daskserve.replanning.record import Journal, read_journal
from daskserve.replanning.split import Split
from daskserve.service.replan_options import ReplanOptions
from daskserve.service.replanner import FixedInstances, Hands, Replanner

SLO_ = SLO(1.0, 0.1)


class Told:
    """A planner with fixed answers."""

    def __init__(self, **goodput_rps: float) -> None:
        self._goodput_rps = goodput_rps

    def predict(self, history, splits, rate_rps):
        return [Prediction(s, self._goodput_rps.get(str(s), 1.0), 0.5) for s in splits]


class Fleet:
    """Three instances that can be looked at and flipped, without a cluster."""

    def __init__(self, can_flip: bool = True) -> None:
        self.roles = {"a": Role.PREFILL, "b": Role.PREFILL, "c": Role.DECODE}
        self.now = 0.0
        self.num_arrived = 0
        self.finished: list[Finished] = []
        self.noted: list[dict] = []
        self.waiting = 0
        self.error: Exception | None = None
        self._can_flip = can_flip

    async def observe(self, cursor: int) -> Snapshot:
        instances = tuple(
            InstanceFigures(a, r.value, "ready", load=InstanceLoad(), can_flip=self._can_flip)
            for a, r in self.roles.items()
        )
        return Snapshot(
            now=self.now,
            at=1e9 + self.now,
            cursor=len(self.finished),
            instances=instances,
            roles={"DECODE": {"waiting": self.waiting, "running": 4, "slots": 4}},
            num_arrived=self.num_arrived,
            finished=tuple(self.finished[cursor:]),
        )

    async def flip(self, instance: str, role: Role, timeout_s: float) -> dict[str, float]:
        if self.error is not None:
            raise self.error
        self.roles[instance] = role
        return {"took_s": 1.0, "drain_s": 0.5, "pause_s": 0.25}

    async def note(self, decision: dict) -> None:
        self.noted.append(decision)

    def serve(self, prompt_tokens: int, output_tokens: int, tpot_s: float = 0.05) -> None:
        """A second of traffic at 10 requests/s."""
        self.now += 1.0
        for _ in range(10):
            decode_s = (output_tokens - 1) * tpot_s
            timeline = Timeline(0.1, 0.1, decode_s=decode_s)
            self.finished.append(Finished(self.now, prompt_tokens, output_tokens, timeline))
        self.num_arrived += 10


def replanner_of(fleet: Fleet, path=None, is_dry_run: bool = False, **goodput_rps) -> Replanner:
    journal = Journal(path)
    policy = Policy(Told(**goodput_rps), SLO_, journal.take_id, is_dry_run=is_dry_run)
    hands = Hands(fleet.observe, fleet.flip, fleet.note, FixedInstances())
    return Replanner(hands, policy, journal, SLO_, measure_s=20)


async def looks(replanner: Replanner, fleet: Fleet, seconds: int, *lengths: int) -> list:
    found = []
    for _ in range(seconds):
        fleet.serve(*lengths)
        decision = await replanner.look()
        if decision is not None:
            found.append(decision)
    return found


async def test_a_change_of_the_mix_is_answered_within_a_minute_and_measured(tmp_path):
    fleet, path = Fleet(), tmp_path / "decisions.jsonl"
    replanner = replanner_of(fleet, path, **{"2P1D": 5.0, "1P2D": 20.0})
    assert await looks(replanner, fleet, 200, 800, 10) == []
    (decision,) = await looks(replanner, fleet, 60, 100, 40)
    assert decision.trigger is Trigger.DRIFT and decision.gain_rps == 15
    assert {one.name for one in decision.evidence} == {"prompt_tokens", "output_tokens"}
    assert list(fleet.roles.values()).count(Role.DECODE) == 2
    await looks(replanner, fleet, 40, 100, 40)
    changed = read_journal(path)[0]
    assert changed.outcome.status is Status.DONE and changed.outcome.pause_s == 0.25
    assert changed.outcome.attainment == 1.0 and changed.outcome.measured_s >= 20
    assert changed.outcome.goodput_rps == pytest.approx(10, rel=0.2)
    assert fleet.noted[-1]["decision_id"] >= 1 and fleet.noted[0]["outcome"] is None


async def test_a_dry_run_decides_and_changes_nothing():
    fleet = Fleet()
    replanner = replanner_of(fleet, is_dry_run=True, **{"2P1D": 5.0, "1P2D": 20.0})
    await looks(replanner, fleet, 200, 800, 10)
    (decision, *_) = await looks(replanner, fleet, 60, 100, 40)
    assert decision.is_change and decision.outcome.status is Status.DRY_RUN
    assert list(fleet.roles.values()).count(Role.DECODE) == 1


async def test_a_flip_that_fails_is_written_down_and_the_next_one_may_come():
    fleet = Fleet()
    replanner = replanner_of(fleet)
    await looks(replanner, fleet, 5, 800, 10)
    fleet.error = ClusterError("a did not finish")
    replanner.ask(Split(1, 2))
    await looks(replanner, fleet, 1, 800, 10)
    assert replanner.journal.decisions[-1].outcome.error == "a did not finish"
    fleet.error = None
    replanner.ask(Split(1, 2))
    (decision,) = await looks(replanner, fleet, 1, 800, 10)
    assert decision.trigger is Trigger.MANUAL
    assert list(fleet.roles.values()).count(Role.DECODE) == 2


async def test_a_queue_alone_flips_within_seconds():
    fleet = Fleet()
    replanner = replanner_of(fleet)
    await looks(replanner, fleet, 5, 800, 10)
    fleet.waiting = 20
    found = await looks(replanner, fleet, 4, 800, 10)
    assert [d.trigger for d in found] == [Trigger.QUEUE]
    assert found[0].actions[0].kind is Kind.FLIP


async def test_instances_that_cannot_flip_are_left_alone():
    fleet = Fleet(can_flip=False)
    replanner = replanner_of(fleet)
    fleet.waiting = 20
    await looks(replanner, fleet, 10, 800, 10)
    replanner.ask(Split(1, 2))
    (decision,) = await looks(replanner, fleet, 1, 800, 10)
    assert decision.reason == "no change, because too few of the instances can flip"


SLOTS = 8


@pytest.fixture
def flippable(mock) -> Iterator[Service]:
    common = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    workers = {}
    for index, names in enumerate((("PREFILL", "DECODE"),) * 2 + (("DECODE", "PREFILL"),)):
        resources = dict.fromkeys(names, SLOTS)
        options = {"nthreads": SLOTS, "resources": resources, "memory_limit": 0}
        workers[index] = {"cls": Worker, "options": {**common, **options}}
    scheduler = {"cls": Scheduler, "options": {**common, "port": 0}}
    with (
        SpecCluster(workers=workers, scheduler=scheduler, silence_logs=50) as cluster,
        Client(cluster) as client,
        Service.attach(client, mock(num_kv_blocks=400), slo=SLO_) as service,
    ):
        yield service


def test_a_service_replans_by_hand_while_it_serves(flippable: Service, tmp_path, eventually):
    path = tmp_path / "decisions.jsonl"
    flippable.replan(ReplanOptions(decisions=path, measure_s=0.2, interval_s=0.05))
    with pytest.raises(ConfigError, match="already"):
        flippable.replan(ReplanOptions())
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    futures = flippable.map(["some words"] * 20, params)
    flippable.replanner.ask(Split(1, 2))
    eventually(lambda: path.exists() and len(path.read_text().splitlines()) >= 3, 20)
    (decision,) = read_journal(path)
    assert decision.outcome.status is Status.DONE
    roles = [instance.role for instance in flippable.info()]
    assert (roles.count(Role.PREFILL), roles.count(Role.DECODE)) == (1, 2)
    assert all(len(c.token_ids) == 50 for c in flippable.client.gather(futures))
    assert flippable.observe().decisions[-1]["outcome"]["status"] == "done"


def test_a_service_without_limits_or_step_times_does_not_replan(flippable: Service):
    with pytest.raises(ConfigError, match="cluster of our own"):
        flippable.replan(ReplanOptions(max_instances=5))
    flippable.slo = None
    with pytest.raises(ConfigError, match="--slo-ttft"):
        flippable.replan(ReplanOptions())
