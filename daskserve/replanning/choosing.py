"""Which change, if any, is worth it: predictions of the planner against the cost of switching.

The cheapest kind that helps is taken: flips of running instances first, then another instance,
and one fewer where even that carries the load with ease.
"""

from __future__ import annotations

from dataclasses import dataclass

from daskserve.core.instance import Role
from daskserve.core.slo import SLO
from daskserve.planner.workload import Workload
from daskserve.replanning.decision import Action, Decision, Kind, Prediction, Trigger
from daskserve.replanning.observation import Observation
from daskserve.replanning.outlook import Planner
from daskserve.replanning.profile import Statistics
from daskserve.replanning.split import Split

NO_CHANGE = "no change, because "


@dataclass(frozen=True, slots=True)
class ChoiceSettings:
    """Parameters
    ----------
    least_gain
        Share of the present goodput that a flip must win at least.
    headroom
        A split suits the traffic if its goodput is so many times the expected rate.
    spare_headroom
        An instance is stopped only if the rest still has so many times the expected rate.
    hold_s
        A change must have paid for itself after so long.
    """

    least_gain: float = 0.05
    headroom: float = 1.2
    spare_headroom: float = 2.0
    hold_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Look:
    """All that a choice rests on.

    Parameters
    ----------
    history
        Requests since the traffic changed.
    statistics
        Of the same time.
    expected_rps
        The rate to be ready for: that seen, or more if a forecast says so.
    least_gain
        See `ChoiceSettings`; more of it for going back to a split that was just left.
    """

    trigger: Trigger
    history: Workload
    statistics: Statistics
    expected_rps: float
    observation: Observation
    least_gain: float


class Chooser:
    """Asks the planner and weighs its answers; decisions come without id and time."""

    def __init__(self, planner: Planner, slo: SLO, settings: ChoiceSettings) -> None:
        self._planner, self._slo, self._settings = planner, slo, settings

    def choose(self, look: Look) -> Decision:
        current = look.observation.split
        if current is None:
            raise ValueError("a choice needs instances of both roles")
        can_flip = all(instance.can_flip for instance in look.observation.instances)
        splits = current.same_size() if can_flip else [current]
        found = self._planner.predict(look.history, splits, look.statistics.rate_rps)
        now = next(one for one in found if one.split == current)
        best = max(found, key=lambda p: (p.goodput_rps, -p.split.flips_from(current)))
        need_rps = look.expected_rps * self._settings.headroom
        if now.goodput_rps >= need_rps:
            return self._enough(look, now, best)
        gain_rps = best.goodput_rps - now.goodput_rps
        is_enough = gain_rps >= max(look.least_gain * now.goodput_rps, 1e-9)
        cost_s, cost_requests = self._cost(look, now, best.split)
        if is_enough and gain_rps * self._settings.hold_s >= cost_requests:
            reason = (
                f"{best.split} is expected to serve {best.goodput_rps:.3g} requests/s within the"
                f" limits, {current} {now.goodput_rps:.3g}"
            )
            actions = flips(look.observation, best.split)
            return _draft(look, reason, actions, now, best, cost_s, cost_requests)
        if best.goodput_rps < look.expected_rps and look.observation.can_add > 0:
            return self._grown(look, now)
        return _draft(look, self._why_not(look, now, best, is_enough), (), now, best)

    def _why_not(self, look: Look, now: Prediction, best: Prediction, is_enough: bool) -> str:
        if best.split == now.split:
            text = f"{now.split} is the best split of {now.split.num_instances} instances"
            if now.goodput_rps < look.expected_rps and look.observation.can_add == 0:
                text += f", too few for {look.expected_rps:.3g} requests/s, and"
                text += f" {look.observation.why_not_add}"
            return NO_CHANGE + text
        gain = best.goodput_rps / max(now.goodput_rps, 1e-9) - 1
        if is_enough:
            return f"{NO_CHANGE}{best.split} would not pay for the switching in time"
        return (
            f"{NO_CHANGE}{best.split} would win {gain:.1%}, less than the"
            f" {look.least_gain:.0%} that a change must win"
        )

    def _enough(self, look: Look, now: Prediction, best: Prediction) -> Decision:
        """The present split carries the load; perhaps with one instance fewer too."""
        spare_rps = look.expected_rps * self._settings.spare_headroom
        if look.observation.can_remove and now.goodput_rps >= spare_rps:
            smaller = self._predict(look, _neighbours(now.split, -1))
            enough = [one for one in smaller if one.goodput_rps >= spare_rps]
            if enough:
                left = max(enough, key=lambda one: one.goodput_rps)
                role = Role.PREFILL
                if left.split.num_decode < now.split.num_decode:
                    role = Role.DECODE
                instance = look.observation.idlest(role)[0]
                action = Action(Kind.REMOVE, role, instance.address, now.split.shape)
                reason = f"{left.split} still has {left.goodput_rps / look.expected_rps:.2g} times"
                return _draft(look, f"{reason} the goodput that is needed", (action,), now, left)
        times = now.goodput_rps / max(look.expected_rps, 1e-9)
        reason = f"{NO_CHANGE}{now.split} carries {times:.2g} times the load"
        return _draft(look, reason, (), now, best)

    def _grown(self, look: Look, now: Prediction) -> Decision:
        best = max(self._predict(look, _neighbours(now.split, 1)), key=lambda p: p.goodput_rps)
        role = Role.PREFILL if best.split.num_prefill > now.split.num_prefill else Role.DECODE
        reason = (
            f"no split of {now.split.num_instances} instances carries {look.expected_rps:.3g}"
            f" requests/s; {best.split} is expected to serve {best.goodput_rps:.3g}"
        )
        return _draft(look, reason, (Action(Kind.ADD, role, "", now.split.shape),), now, best)

    def _predict(self, look: Look, splits: list[Split]) -> list[Prediction]:
        return self._planner.predict(look.history, splits, look.statistics.rate_rps)

    def _cost(self, look: Look, now: Prediction, after: Split) -> tuple[float, float]:
        """Seconds of switching, one instance after the other, and requests not served by them."""
        flips_to_prefill = after.num_prefill - now.split.num_prefill
        drain_s = self._slo.ttft_s
        if flips_to_prefill > 0:  # answers run to their end
            drain_s = self._slo.tpot_s * (look.statistics.output_tokens.p90 or 0.0)
        seconds = abs(flips_to_prefill) * drain_s
        return seconds, seconds * now.goodput_rps / now.split.num_instances


def flips(observation: Observation, after: Split) -> tuple[Action, ...]:
    """The instances to flip for a split of equal size, those first that drain soonest."""
    before = observation.split
    if before is None:
        return ()
    to_prefill = after.num_prefill - before.num_prefill
    new, old = (Role.PREFILL, Role.DECODE) if to_prefill > 0 else (Role.DECODE, Role.PREFILL)
    chosen = observation.idlest(old)[: abs(to_prefill)]
    return tuple(Action(Kind.FLIP, new, one.address, one.shape) for one in chosen)


def rebuilt(observation: Observation, after: Split) -> tuple[Action, ...]:
    """Instances to start, then those to stop, for a split of another size or shape."""
    before = observation.split
    if before is None:
        return ()
    adds, removes = [], []
    for role in (Role.PREFILL, Role.DECODE):
        running = observation.of_role(role)
        if after.shape != before.shape:
            missing, leaving = after.count(role), running
        else:
            missing = after.count(role) - len(running)
            # The idlest drain soonest.
            leaving = sorted(running, key=lambda one: one.num_running)[: max(-missing, 0)]
        adds += [Action(Kind.ADD, role, "", after.shape)] * max(missing, 0)
        removes += [Action(Kind.REMOVE, role, one.address, one.shape) for one in leaving]
    return (*adds, *removes)


def _neighbours(split: Split, step: int) -> list[Split]:
    """One instance more, or fewer, of either role."""
    prefill, decode = split.num_prefill, split.num_decode
    return [
        Split(more[0], more[1], split.shape)
        for more in ((prefill + step, decode), (prefill, decode + step))
        if min(more) >= 1
    ]


def _draft(
    look: Look,
    reason: str,
    actions: tuple[Action, ...],
    before: Prediction,
    after: Prediction,
    cost_s: float = 0.0,
    cost_requests: float = 0.0,
) -> Decision:
    return Decision(
        decision_id=0,
        at_unix_s=0.0,
        trigger=look.trigger,
        reason=reason,
        actions=actions,
        before=before,
        after=after,
        switching_s=cost_s,
        switching_requests=cost_requests,
        gain_rps=max(after.goodput_rps - before.goodput_rps, 0.0),
    )
