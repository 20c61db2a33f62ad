"""What the replanner decided and why, what it expected of it, and what came of it.

A journal holds JSON lines, one `Decision` each, with the fields below under their own names; a
split is text such as ``4P2D``. Once a decision is carried out and its effect is measured, it is
written again with its ``outcome``: of lines with the same ``decision_id`` the last one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.replanning.split import Split


class Kind(StrEnum):
    """Actions, the cheapest first."""

    FLIP = "flip"
    ADD = "add"
    REMOVE = "remove"


class Trigger(StrEnum):
    """What made the replanner look."""

    DRIFT = "drift"
    """The drift test said that the traffic has changed."""
    REVIEW = "review"
    """A look some time after a drift, when more of the new traffic has been seen."""
    QUEUE = "queue"
    """The fast path: one role has a queue while the other has instances to spare."""
    MANUAL = "manual"
    """Somebody asked for it."""


class Status(StrEnum):
    """What became of a decision."""

    DONE = "done"
    FAILED = "failed"
    DRY_RUN = "dry run"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do to one instance; a change of parallelism is some ADD, then some REMOVE.

    Parameters
    ----------
    role
        The role it has afterwards; of REMOVE the one that it had.
    instance
        Address; empty for ADD.
    """

    kind: Kind
    role: Role
    instance: str = ""
    shape: Parallelism = Parallelism()


@dataclass(frozen=True, slots=True)
class Evidence:
    """One figure that spoke for looking.

    Parameters
    ----------
    name
        Such as ``prompt_tokens``.
    before, now
        Its value that the present split was chosen for, and of late.
    statistic, threshold
        The test's; evidence is what reaches the threshold.
    """

    name: str
    before: float
    now: float
    statistic: float
    threshold: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the planner expects of a split.

    Parameters
    ----------
    goodput_rps
        Highest rate, in requests/s, at which enough requests meet both limits.
    attainment
        Share that meets both at the rate that is seen now; None: not asked.
    """

    split: Split
    goodput_rps: float
    attainment: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it, measured.

    Parameters
    ----------
    took_s
        From the first action to the end of the last: draining and flipping.
    pause_s
        The longest time in which a request waited and none of its kind could be sent anywhere.
    num_failed
        Requests that failed from the beginning of the change to the end of the measurement.
    attainment, goodput_rps
        Share of the requests that met both limits afterwards, and those per second; None where
        nothing was measured.
    measured_s
        For so long.
    """

    status: Status
    error: str = ""
    took_s: float = 0.0
    pause_s: float = 0.0
    num_failed: int = 0
    attainment: float | None = None
    goodput_rps: float | None = None
    measured_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """One look and what it came to; without actions it says why nothing is changed.

    Parameters
    ----------
    decision_id
        Counts from 1 within a journal.
    at_unix_s
        Wall clock; in a simulated run the seconds of that run.
    reason
        One sentence for people; "no change, because ..." without actions.
    before, after
        Predictions for the split as it was and as it will be (the best other one, if nothing is
        changed); None where the planner was not asked, as on the fast path.
    switching_s, switching_requests
        Cost of the change: how long it is expected to take, and requests that the instances
        concerned could have served meanwhile.
    gain_rps
        Goodput that is expected to be won, in requests/s.
    is_dry_run
        It is written down only.
    """

    decision_id: int
    at_unix_s: float
    trigger: Trigger
    reason: str
    evidence: tuple[Evidence, ...] = ()
    actions: tuple[Action, ...] = ()
    before: Prediction | None = None
    after: Prediction | None = None
    switching_s: float = 0.0
    switching_requests: float = 0.0
    gain_rps: float = 0.0
    is_dry_run: bool = False
    outcome: Outcome | None = None

    @property
    def is_change(self) -> bool:
        return bool(self.actions)

    def with_outcome(self, outcome: Outcome) -> Decision:
        return replace(self, outcome=outcome)

    def to_json(self) -> dict[str, Any]:
        """Plain types only; `from_json` gives back an equal decision."""
        record = asdict(self)
        for name, prediction in (("before", self.before), ("after", self.after)):
            if prediction is not None:
                record[name]["split"] = str(prediction.split)
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Decision:
        """What `to_json` gave. Raises KeyError, TypeError or ValueError for anything else."""
        outcome = record["outcome"]
        return cls(
            **{
                **record,
                "trigger": Trigger(record["trigger"]),
                "evidence": tuple(Evidence(**one) for one in record["evidence"]),
                "actions": tuple(_action(one) for one in record["actions"]),
                "before": _prediction(record["before"]),
                "after": _prediction(record["after"]),
                "outcome": outcome and Outcome(**{**outcome, "status": Status(outcome["status"])}),
            }
        )


def _action(record: Mapping[str, Any]) -> Action:
    return Action(
        Kind(record["kind"]),
        Role(record["role"]),
        record["instance"],
        Parallelism(**record["shape"]),
    )


def _prediction(record: Mapping[str, Any] | None) -> Prediction | None:
    if record is None:
        return None
    return Prediction(Split.parse(record["split"]), record["goodput_rps"], record["attainment"])
