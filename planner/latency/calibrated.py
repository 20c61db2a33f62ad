"""The latency model of one model on one machine, as ``daskserve calibrate`` measured it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.errors import ConfigError, ModelError
from daskserve.planner.hardware import GPU, Cluster
from daskserve.planner.latency.memory import MemoryBudget
from daskserve.planner.latency.paper import PaperCoefficients, PaperModel
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class CalibratedModel:
    """Step times in the paper's form, under limits that were measured with them.

    Parameters
    ----------
    model
        What was measured; step times of any other model are refused.
    hardware
        One instance's share of the machine: the measured bandwidths and FLOP/s are the physics
        guard, and stand in for the GPU of the same name.
    coefficients
        Of a step by itself.
    prefill_budget_tokens, max_batch_size
        L_m, and the largest decode batch that was measured.
    dispatch_s
        From a request's submission to an idle prefill instance that starts on it.
    hand_over_s
        From the first token to the first decode step, without the bytes of the KV.
    prefill_extra_s, prefill_extra_per_token_s, decode_extra_s, decode_extra_per_request_s
        What a step in a service takes longer than a step by itself: always, and for each
        prompt token or request of it.
    prefill_following_s
        What a prefill step takes longer that begins as another one ends.
    prefill_slowdown, decode_slowdown
        What steps take longer beside an instance of the other role, see `Deployment`.
    is_colocated
        The instance does both: its steps always take that much longer.
    """

    model: ModelSpec
    hardware: GPU
    coefficients: PaperCoefficients
    prefill_budget_tokens: int
    max_batch_size: int
    dispatch_s: float = 0.0
    hand_over_s: float = 0.0
    prefill_extra_s: float = 0.0
    prefill_extra_per_token_s: float = 0.0
    decode_extra_s: float = 0.0
    decode_extra_per_request_s: float = 0.0
    prefill_following_s: float = 0.0
    prefill_slowdown: float = 0.0
    decode_slowdown: float = 0.0
    is_colocated: bool = False
    memory: MemoryBudget = field(default_factory=MemoryBudget)

    def step_times(self, model: ModelSpec, gpu: GPU, parallelism: Parallelism) -> StepTimes:
        if gpu.name != self.hardware.name:
            raise ConfigError(
                f"the calibration is of {self.hardware.name}, not of {gpu.name}; calibrate there"
            )
        if replace(model, name=self.model.name) != self.model:
            raise ConfigError(
                f"the calibration is of {self.model.name}, {model.name} has other sizes:"
                " calibrate that model, or leave --model out"
            )
        if parallelism != Parallelism():
            raise ModelError(f"the calibration is of one process, not of {parallelism}")
        weights = model.num_active_parameters
        alone, per_request = self.coefficients, self.decode_extra_per_request_s / weights
        growth = alone.growth or ((1, 0.0), (self.max_batch_size, 0.0))
        inside = replace(
            alone,
            c1=alone.c1 + self.prefill_extra_per_token_s / weights,
            c3=alone.c3 + self.prefill_extra_s,
            c4=alone.c4 + self.decode_extra_s / weights,
            growth=tuple((batch, added + per_request * batch) for batch, added in growth),
        )
        paper = PaperModel({1: inside}, self.memory, self.max_batch_size)
        step = paper.step_times(model, self.hardware, parallelism)
        step = replace(
            step,
            prefill_budget_tokens=self.prefill_budget_tokens,
            prefill_following_s=self.prefill_following_s,
        )
        if self.is_colocated:
            step = step.slowed(self.prefill_slowdown, self.decode_slowdown)
        return step

    def alone(self) -> CalibratedModel:
        """The same without what a service adds to its steps."""
        return replace(
            self,
            prefill_extra_s=0.0,
            prefill_extra_per_token_s=0.0,
            decode_extra_s=0.0,
            decode_extra_per_request_s=0.0,
            prefill_following_s=0.0,
            is_colocated=False,
        )

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster with the measured hardware in place of the data sheet's."""
        groups = tuple(
            replace(group, gpu=self.measured(group.gpu).priced(group.gpu.price_per_hour))
            for group in cluster.groups
        )
        return replace(cluster, groups=groups, link_latency_s=self.hand_over_s, **self.beside)

    @property
    def beside(self) -> dict[str, float]:
        """What steps take longer beside an instance of the other role, as `Deployment` has it."""
        shares = (0.0, 0.0) if self.is_colocated else (self.prefill_slowdown, self.decode_slowdown)
        return dict(zip(("prefill_slowdown", "decode_slowdown"), shares, strict=True))

    def less_dispatch(self, slo: SLO) -> SLO:
        """What is left of the limits once a request is dispatched.

        Raises
        ------
        ConfigError
            Nothing of the TTFT is left.
        """
        left_s = slo.ttft_s - self.dispatch_s
        if left_s <= 0:
            raise ConfigError(
                f"TTFT {slo.ttft_s:g} s is less than the calibrated dispatch of a request,"
                f" {self.dispatch_s:.4g} s"
            )
        return replace(slo, ttft_s=left_s)

    def measured(self, gpu: GPU) -> GPU:
        """The measured hardware if it goes by the same name, else the GPU as given."""
        return self.hardware if gpu.name == self.hardware.name else gpu
