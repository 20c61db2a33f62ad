"""How long one instance takes for a step: what every latency model answers and simulators read.

Arrays rather than calls, so that a compiled event loop can use any latency model. Seconds and
tokens throughout; times are those of the whole model, the pipeline divides them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from daskserve.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Step times of one instance: one model with its TP and PP on one GPU type.

    Parameters
    ----------
    prefill_knots_tokens, prefill_knots_s
        Seconds for one pass of the whole model over that many prompt tokens: linear between
        the knots, the last slope goes on. The first knot is at 0 tokens.
    prefill_quadratic_s
        Added per squared token of each prompt (attention): ``* sum(length**2)``.
    prefill_per_prompt_s
        Added for each prompt of a pass, or part of one: engines compute each in whole tiles.
    prefill_following_s
        Added to a step of a prefill instance that begins as another one ends: the instance gives
        the KV of that one's requests away meanwhile.
    decode_base_s
        Index = requests in the micro-batch, ``[0]`` is 0: seconds of one decode pass of the
        whole model with empty contexts.
    decode_per_context_s
        Same index: seconds added per token of context, summed over the micro-batch.
    num_stages
        Pipeline stages. A stage takes ``whole pass / num_stages + stage_overhead_s``; a decode
        instance keeps ``num_stages`` micro-batches in flight.
    kv_capacity_tokens
        Tokens of KV that the whole instance holds.
    prefill_budget_tokens
        L_m: prompts are batched up to this many tokens.
    max_batch_size
        Most requests in one micro-batch, at most ``len(decode_base_s) - 1``.
    """

    prefill_knots_tokens: np.ndarray
    prefill_knots_s: np.ndarray
    prefill_quadratic_s: float
    decode_base_s: np.ndarray
    decode_per_context_s: np.ndarray
    num_stages: int = 1
    stage_overhead_s: float = 0.0
    kv_capacity_tokens: int = 2**40
    prefill_budget_tokens: int = 2048
    max_batch_size: int = field(default=0)
    prefill_per_prompt_s: float = 0.0
    prefill_following_s: float = 0.0

    def __post_init__(self) -> None:
        arrays = (
            "prefill_knots_tokens",
            "prefill_knots_s",
            "decode_base_s",
            "decode_per_context_s",
        )
        for name in arrays:
            array = np.ascontiguousarray(getattr(self, name), dtype=np.float64)
            if array.ndim != 1 or not np.isfinite(array).all() or (array < 0).any():
                raise ConfigError(f"{name} must be one row of finite numbers of at least 0")
            object.__setattr__(self, name, array)
        self._check_shapes()
        if self.max_batch_size == 0:
            object.__setattr__(self, "max_batch_size", len(self.decode_base_s) - 1)
        if not 1 <= self.max_batch_size < len(self.decode_base_s):
            raise ConfigError(
                f"max_batch_size={self.max_batch_size} must be 1..{len(self.decode_base_s) - 1},"
                " the largest batch that decode_base_s covers"
            )
        for name in ("num_stages", "prefill_budget_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        at_least_0 = (
            "stage_overhead_s",
            "kv_capacity_tokens",
            "prefill_quadratic_s",
            "prefill_per_prompt_s",
            "prefill_following_s",
        )
        for name in at_least_0:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 0")

    def _check_shapes(self) -> None:
        knots = self.prefill_knots_tokens
        if len(knots) < 2 or len(knots) != len(self.prefill_knots_s):
            raise ConfigError("prefill needs at least two knots, one time for each")
        if knots[0] != 0 or (np.diff(knots) <= 0).any():
            raise ConfigError("prefill_knots_tokens must start at 0 and increase")
        if len(self.decode_base_s) < 2 or len(self.decode_base_s) != len(self.decode_per_context_s):
            raise ConfigError("decode arrays must have one entry per batch size from 0, and agree")

    def limited_to(
        self,
        kv_capacity_tokens: int | None = None,
        prefill_budget_tokens: int | None = None,
        max_batch_size: int | None = None,
    ) -> StepTimes:
        """The same times under other limits; None keeps a limit.

        Raises
        ------
        ConfigError
            More KV than there is memory for, or a larger batch than the times cover.
        """
        if kv_capacity_tokens is not None and kv_capacity_tokens > self.kv_capacity_tokens:
            raise ConfigError(
                f"kv_capacity_tokens={kv_capacity_tokens} is more than the"
                f" {self.kv_capacity_tokens} tokens that there is memory for"
            )
        given: dict[str, Any] = {
            "kv_capacity_tokens": kv_capacity_tokens,
            "prefill_budget_tokens": prefill_budget_tokens,
            "max_batch_size": max_batch_size,
        }
        return replace(self, **{key: value for key, value in given.items() if value is not None})

    def slowed(self, prefill: float, decode: float) -> StepTimes:
        """The same instance where steps take so much longer, as shares."""
        return replace(
            self,
            prefill_knots_s=self.prefill_knots_s * (1.0 + prefill),
            prefill_quadratic_s=self.prefill_quadratic_s * (1.0 + prefill),
            prefill_per_prompt_s=self.prefill_per_prompt_s * (1.0 + prefill),
            prefill_following_s=self.prefill_following_s * (1.0 + prefill),
            decode_base_s=self.decode_base_s * (1.0 + decode),
            decode_per_context_s=self.decode_per_context_s * (1.0 + decode),
        )

    def prefill_s(
        self,
        num_tokens: float,
        sum_of_squares: float | None = None,
        num_prompts: float = 1.0,
    ) -> float:
        """Seconds of one pass over ``num_tokens`` prompt tokens (one prompt unless told)."""
        squares = num_tokens**2 if sum_of_squares is None else sum_of_squares
        knots, times = self.prefill_knots_tokens, self.prefill_knots_s
        if num_tokens >= knots[-1]:
            slope = (times[-1] - times[-2]) / (knots[-1] - knots[-2])
            linear = times[-1] + slope * (num_tokens - knots[-1])
        else:
            linear = float(np.interp(num_tokens, knots, times))
        added = self.prefill_quadratic_s * squares + self.prefill_per_prompt_s * num_prompts
        return float(linear + added)

    def decode_s(self, batch_size: int, context_tokens: float) -> float:
        """Seconds of one pass that adds a token to each request of a micro-batch.

        ``context_tokens`` is the sum over the micro-batch.
        """
        per_context = self.decode_per_context_s[batch_size]
        return float(self.decode_base_s[batch_size] + per_context * context_tokens)

    def stage_s(self, pass_s: float) -> float:
        """Seconds that one pipeline stage takes of a pass."""
        return pass_s / self.num_stages + self.stage_overhead_s

    def latency_s(self, pass_s: float) -> float:
        """Seconds from entering the first stage to leaving the last, without waiting."""
        return pass_s + self.num_stages * self.stage_overhead_s


def saturating_tokens(tokens: np.ndarray, seconds: np.ndarray, share: float = 0.9) -> int:
    """L_m: the fewest tokens of a pass that reach ``share`` of the best throughput."""
    throughput = tokens[1:] / seconds[1:]
    enough = throughput >= share * throughput.max()
    return max(1, int(tokens[1:][np.argmax(enough)]))
