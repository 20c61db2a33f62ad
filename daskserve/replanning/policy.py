"""When to change the split, and to what: pure, time is a parameter.

What came and what was served is fed in with `saw`; `decide` is called a few times per second and
mostly says nothing. An alarm of the drift test, once enough of the new traffic has been seen,
makes it ask the planner; what comes out is a `Decision`, be it "no change, because". Whoever
carries it out reports back with `ended`; until then nothing else is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from daskserve.core.instance import Role
from daskserve.core.slo import SLO
from daskserve.replanning.choosing import NO_CHANGE, ChoiceSettings, Chooser, Look, flips, rebuilt
from daskserve.replanning.decision import (
    Action,
    Decision,
    Evidence,
    Kind,
    Outcome,
    Status,
    Trigger,
)
from daskserve.replanning.drift import DriftSettings, DriftTest
from daskserve.replanning.fast_path import FastPath, FastPathSettings
from daskserve.replanning.forecast import RateForecast
from daskserve.replanning.observation import Observation
from daskserve.replanning.outlook import Planner
from daskserve.replanning.profile import Served, WorkloadProfile
from daskserve.replanning.split import Split

_FORECAST_S = 600.0


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Parameters
    ----------
    settle_s
        After an alarm, so much of the new traffic is waited for.
    review_s
        After a plan that followed an alarm, one more look, with more of the new traffic.
    cool_down_s
        Between two changes that the planner makes.
    reversal_s
        So long after a change, going back to the split before it must win twice as much.
    """

    drift: DriftSettings = DriftSettings()
    fast_path: FastPathSettings = FastPathSettings()
    choice: ChoiceSettings = ChoiceSettings()
    settle_s: float = 15.0
    review_s: float = 60.0
    cool_down_s: float = 30.0
    reversal_s: float = 600.0


@dataclass(slots=True)
class _Due:
    """A look that the planner is to be asked for."""

    at_s: float
    trigger: Trigger
    since_s: float
    evidence: tuple[Evidence, ...]


class Policy:
    """Parameters
    ----------
    planner
        Asked on alarms only.
    slo
        What is to be met.
    take_id
        Gives the ids of decisions.
    is_dry_run
        Decides as if, and takes it that nothing was changed.
    """

    def __init__(
        self,
        planner: Planner,
        slo: SLO,
        take_id: Callable[[], int],
        settings: PolicySettings = PolicySettings(),
        is_dry_run: bool = False,
    ) -> None:
        self.settings = settings
        self.profile = WorkloadProfile()
        self.drift = DriftTest(settings.drift)
        self.forecast = RateForecast()
        self.is_dry_run = is_dry_run
        self._slo, self._take_id = slo, take_id
        self._chooser = Chooser(planner, slo, settings.choice)
        self._fast = FastPath(settings.fast_path)
        self._due: _Due | None = None
        self._asked: Split | None = None
        self._open: Decision | None = None
        self._changed_at = self._free_at = float("-inf")
        self._left: Split | None = None
        self._num_arrived = 0

    # What happens.

    def saw(self, now_s: float, num_arrived: int, num_failed: int, ended: Sequence[Served]) -> None:
        """Before every `decide`: requests that have come and failed in all, and new answers."""
        came = num_arrived - self._num_arrived
        self._num_arrived = num_arrived
        self.profile.saw(now_s, num_arrived, num_failed, ended)
        self.forecast.arrived(now_s, came)
        drift = self.drift.saw(
            now_s,
            came,
            [one.prompt_tokens for one in ended],
            [one.output_tokens for one in ended],
        )
        if drift is not None and (self._due is None or self._due.trigger is Trigger.REVIEW):
            at_s = now_s + self.settings.settle_s
            self._due = _Due(at_s, Trigger.DRIFT, drift.last_s, drift.evidence)

    def ask(self, split: Split) -> None:
        """Manual override: go to this split at the next occasion, whatever the planner thinks.

        Of the same size and shape by flips; of another one, so another parallelism too, by
        starting instances first and stopping others then.
        """
        self._asked = split

    def ended(self, now_s: float, decision: Decision, outcome: Outcome) -> None:
        """A decision with actions was carried out, or not."""
        if self._open is not None and self._open.decision_id == decision.decision_id:
            self._open = None
        if outcome.status is Status.DONE:
            self._changed(now_s, decision)

    # What to do.

    def decide(self, now_s: float, at_unix_s: float, observation: Observation) -> Decision | None:
        """The next decision, if there is one to make now. May ask the planner: takes seconds."""
        if self._open is not None or observation.is_busy or observation.split is None:
            return None
        draft = (
            self._by_hand(observation)
            or self._fast_decision(now_s, observation)
            or self._planned(now_s, observation)
        )
        if draft is None:
            return None
        decision = replace(
            draft,
            decision_id=self._take_id(),
            at_unix_s=at_unix_s,
            is_dry_run=self.is_dry_run,
        )
        if decision.is_change:
            self._left = observation.split
            if self.is_dry_run:
                self._changed(now_s, decision)
                return decision.with_outcome(Outcome(Status.DRY_RUN))
            self._open = decision
        return decision

    def _by_hand(self, observation: Observation) -> Decision | None:
        asked, self._asked = self._asked, None
        split = observation.split
        if asked is None or split is None:
            return None
        reason, actions = f"asked for {asked}", flips(observation, asked)
        if asked == split:
            reason = f"{NO_CHANGE}{asked} is what runs"
        elif asked.num_instances != split.num_instances or asked.shape != split.shape:
            actions = rebuilt(observation, asked)
            kinds = [action.kind for action in actions]
            if kinds.count(Kind.ADD) > observation.can_add:
                actions, reason = (), NO_CHANGE + observation.why_not_add
            elif Kind.REMOVE in kinds and not observation.can_remove:
                actions, reason = (), f"{NO_CHANGE}this cluster cannot stop instances"
        elif len(actions) < asked.flips_from(split):
            actions, reason = (), f"{NO_CHANGE}too few of the instances can flip"
        return Decision(0, 0.0, Trigger.MANUAL, reason, actions=actions)

    def _fast_decision(self, now_s: float, observation: Observation) -> Decision | None:
        starved = self._fast.look(now_s, observation)
        if starved is None:
            return None
        role = starved.role
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        spare = observation.idlest(other)[0]
        reason = f"{role.value} has a queue, {other.value} an instance to spare"
        return Decision(
            decision_id=0,
            at_unix_s=0.0,
            trigger=Trigger.QUEUE,
            reason=reason,
            evidence=(starved.evidence,),
            actions=(Action(Kind.FLIP, role, spare.address, spare.shape),),
        )

    def _planned(self, now_s: float, observation: Observation) -> Decision | None:
        due = self._due
        if due is None or now_s < max(due.at_s, self._free_at):
            return None
        statistics = self.profile.statistics(now_s, now_s - due.since_s)
        if statistics.num_served < self.settings.drift.least_requests:
            due.at_s = now_s + self.settings.settle_s
            return None
        self._due = None
        if due.trigger is Trigger.DRIFT:
            self.drift.restart(now_s)
            again_s = now_s + self.settings.review_s
            self._due = _Due(again_s, Trigger.REVIEW, now_s, due.evidence)
        forecast = self.forecast.ahead(now_s, _FORECAST_S)
        expected_rps = max(statistics.rate_rps, forecast.rate_rps if forecast else 0.0)
        look = Look(
            trigger=due.trigger,
            history=self.profile.history(due.since_s),
            statistics=statistics,
            expected_rps=expected_rps,
            observation=observation,
            least_gain=self.settings.choice.least_gain,
        )
        draft = self._chooser.choose(look)
        is_back = draft.after is not None and draft.after.split == self._left
        if draft.is_change and is_back and now_s < self._changed_at + self.settings.reversal_s:
            draft = self._chooser.choose(replace(look, least_gain=2 * look.least_gain))
        return replace(draft, evidence=due.evidence)

    def _changed(self, now_s: float, decision: Decision) -> None:
        self._changed_at = now_s
        self._free_at = now_s + self.settings.cool_down_s
        for action in decision.actions:
            if action.kind is Kind.FLIP:
                self._fast.flipped(now_s, action.role)
