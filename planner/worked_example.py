"""The worked example: a 70B model with GQA on H100 nodes, with closed forms for a simulator.

Prefill is an M/D/1 queue, decode grows its batch until memory or the SLO ends it. Every figure
can be checked by hand, which makes the example the yardstick of the placement search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.planner.queueing import PrefillQueue
from daskserve.planner.search.space import SearchSpace
from daskserve.planner.search.units import Estimate, Unit

RATE = 200.0
SPACE = SearchSpace(nodes_per_instance=2, gpus_per_node=8)
LARGEST_BATCH = 4096


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """Goodput of prefill and decode instances by formula.

    Parameters
    ----------
    prefill_s
        D: one prompt on one notional GPU, at 50 % of its FLOP/s.
    tp_exponent
        Prefill speed-up is ``tp ** tp_exponent``: 1.6 for two GPUs.
    decode_tp_exponent
        The same for decode's bandwidth and FLOP/s.
    stage_overhead
        Share that each pipeline stage after the first adds to a pass.
    """

    slo: SLO = field(default_factory=lambda: SLO(ttft_s=0.25, tpot_s=0.05))
    prompt_tokens: int = 512
    output_tokens: int = 256
    weight_bytes: float = 140e9
    num_parameters: float = 70e9
    num_layers: int = 80
    num_heads: int = 64
    kv_bytes_per_token: float = 327_680
    gpu_bytes: float = 80e9
    memory_bandwidth: float = 3.35e12
    effective_flops: float = 0.5 * 989e12
    prefill_s: float = 0.145
    tp_exponent: float = 0.678
    decode_tp_exponent: float = 0.9
    stage_overhead: float = 0.02

    def fits(self, gpu: str, parallelism: Parallelism) -> bool:
        """Weights strictly below the memory, layers and heads divided evenly."""
        divides = self.num_layers % parallelism.pp == 0 and self.num_heads % parallelism.tp == 0
        return divides and self.weight_bytes / parallelism.num_gpus < self.gpu_bytes

    def bound(self, unit: Unit) -> float:
        return math.inf

    def evaluate(self, units: Sequence[Unit]) -> list[Estimate]:
        """A unit is limited by its slower phase."""
        return [Estimate.exactly(self._rate(unit)) for unit in units]

    def _rate(self, unit: Unit) -> float:
        rate_of = {Role.PREFILL: self.prefill_rate, Role.DECODE: self.decode_rate}
        return min(group.count * rate_of[group.role](group.parallelism) for group in unit.groups)

    def prefill_rate(self, parallelism: Parallelism) -> float:
        """Highest rate whose mean TTFT, ``Ds + R Dm^2 / (2 (1 - R Dm))``, meets the SLO."""
        speed_up = parallelism.tp**self.tp_exponent
        queue = PrefillQueue.of(self.prefill_s, speed_up, parallelism.pp, self.stage_overhead)
        return queue.highest_rate(self.slo.ttft_s)

    def decode_step_s(self, parallelism: Parallelism, batch: int) -> float:
        """One token for every request of a micro-batch: memory or compute, whichever is slower."""
        speed_up = parallelism.tp**self.decode_tp_exponent
        context = self.prompt_tokens + self.output_tokens
        read = self.weight_bytes + batch * context * self.kv_bytes_per_token
        memory_s = read / (self.memory_bandwidth * speed_up)
        compute_s = 2.0 * self.num_parameters * batch / (self.effective_flops * speed_up)
        return max(memory_s, compute_s) * (1.0 + self.stage_overhead * (parallelism.pp - 1))

    def decode_rate(self, parallelism: Parallelism) -> float:
        """Rate at the largest micro-batch that memory and the TPOT SLO allow."""
        batch = self._largest_batch(parallelism)
        if batch == 0:
            return 0.0
        step_s = self.decode_step_s(parallelism, batch)
        return parallelism.pp * batch / step_s / self.output_tokens

    def _largest_batch(self, parallelism: Parallelism) -> int:
        budget = parallelism.num_gpus * self.gpu_bytes - self.weight_bytes
        request_bytes = (self.prompt_tokens + self.output_tokens) * self.kv_bytes_per_token
        in_memory = int(budget // (parallelism.pp * request_bytes))
        low, high = 0, min(LARGEST_BATCH, in_memory)
        while low < high:  # the step time grows with the batch, so halving finds the edge
            middle = (low + high + 1) // 2
            if self.decode_step_s(parallelism, middle) <= self.slo.tpot_s:
                low = middle
            else:
                high = middle - 1
        return low
