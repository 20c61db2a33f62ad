"""What is asked on the What-if page, and what of it has any say."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from daskserve.core.slo import SLO
from daskserve.planner.estimate import sized_evaluator
from daskserve.planner.hardware import Cluster
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.plan_record import PlanRecord, estimated
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.search.sized import SizedEvaluator
from daskserve.planner.workload import Workload

SEEDS = (0, 1)
MAX_REQUESTS = 30_000


@dataclass(frozen=True, slots=True)
class Question:
    """A model, GPUs, traffic and limits.

    Parameters
    ----------
    prompt_tokens, output_tokens
        Of every request.
    network_gbps
        Of one node, to the others.
    price
        Dollars per GPU and hour.
    """

    model: str = "opt-13b"
    gpu: str = "A100"
    gpus_per_node: int = 8
    num_nodes: int = 4
    rate: float = 20.0
    prompt_tokens: int = 512
    output_tokens: int = 128
    ttft_s: float = 0.25
    tpot_s: float = 0.1
    network_gbps: float = 400.0
    price: float = 1.8

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    def request(self) -> PlanRequest:
        """For the planner (DaskserveError when it cannot be asked)."""
        cluster = Cluster.of(
            self.gpu, self.num_nodes, self.gpus_per_node, self.network_gbps, self.price
        )
        workload = Workload.from_arrays([0.0], [self.prompt_tokens], [self.output_tokens])
        return PlanRequest(
            ModelSpec.load(self.model),
            cluster,
            workload,
            SLO(self.ttft_s, self.tpot_s),
            rate=self.rate,
            seeds=SEEDS,
            max_requests=MAX_REQUESTS,
        )

    def without_say(self) -> dict[str, str]:
        """Fields that change nothing here, with the reason."""
        idle = {}
        if self.num_nodes == 1:
            idle["network_gbps"] = "one node has no network between nodes"
        if self.output_tokens == 1:
            idle["tpot_s"] = "a single output token has no time per output token"
        return idle


@lru_cache(maxsize=256)
def estimate_of(question: Question) -> PlanRecord:
    """The answer by formula, at once (DaskserveError when the planner cannot be asked)."""
    return estimated(question.request(), question.to_record(), _formulas(_plain(question)))


def _plain(question: Question) -> Question:
    """Without what formulas for one instance do not depend on: a slider moves one thing only."""
    return replace(question, rate=1.0, price=1.0)


@lru_cache(maxsize=16)
def _formulas(question: Question) -> SizedEvaluator:
    return sized_evaluator(question.request())
