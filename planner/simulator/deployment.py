"""What is simulated: how many instances of which step times, and the links between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from daskserve.errors import ConfigError
from daskserve.planner.step_times import StepTimes

MODES = ("disaggregated", "prefill_first", "chunked")

Instances = StepTimes | tuple[StepTimes, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class Deployment:
    """Instances and links; see the class methods for the usual kinds.

    Parameters
    ----------
    mode
        ``disaggregated``; or colocated: ``prefill_first`` (continuous batching that computes
        whole prompts before it decodes on) and ``chunked`` (prompts in pieces that ride along
        with decode steps).
    prefill, num_prefill
        Step times of the prefill instances: one for all, or a tuple with one for each.
        Disaggregated only; without any, requests arrive with their first token.
    decode, num_decode
        The same for instances that decode: those of a colocated deployment too. Without any,
        requests end with their first token.
    chunk_tokens
        ``chunked`` only: tokens of one mixed step, those of decoding requests included.
    kv_bytes_per_token
        Of the whole model; what a transfer moves.
    link_bandwidth, decode_link_bandwidth
        Bytes/s of the link of each prefill and of each decode instance (None: the same).
    link_latency_s
        Added to every transfer.
    prefill_slowdown, decode_slowdown
        Instances on one machine that compete for its memory and cores: how much longer a step
        of this role takes, as a share of its time alone, for each instance of the other role
        that computes at the same time.
    block_size
        Tokens per KV page.
    max_tokens
        Output limit that callers state with every request, as the service's router books memory
        for it: longer answers are cut there and nothing is ever preempted. None: memory is
        taken as it is used.
    """

    mode: str = "disaggregated"
    prefill: Instances = None
    num_prefill: int = 0
    decode: Instances = None
    num_decode: int = 0
    chunk_tokens: int | None = None
    kv_bytes_per_token: float = 0.0
    link_bandwidth: float = math.inf
    decode_link_bandwidth: float | None = None
    link_latency_s: float = 0.0
    prefill_slowdown: float = 0.0
    decode_slowdown: float = 0.0
    block_size: int = 16
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode={self.mode!r} must be one of {', '.join(MODES)}")
        for name in ("prefill", "decode"):
            _check_instances(name, getattr(self, name), getattr(self, f"num_{name}"))
        if self.num_prefill + self.num_decode == 0:
            raise ConfigError("a deployment needs at least one instance")
        colocated = self.mode != "disaggregated"
        if colocated and self.num_prefill > 0:
            raise ConfigError(f"mode={self.mode!r} has no prefill instances: use num_decode")
        if (self.chunk_tokens is not None) != (self.mode == "chunked"):
            raise ConfigError("chunk_tokens is needed by mode='chunked' and by no other")
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens={self.chunk_tokens} must be at least 1")
        if self.block_size < 1:
            raise ConfigError(f"block_size={self.block_size} must be at least 1")
        if self.max_tokens is not None and (self.max_tokens < 1 or self.num_decode == 0):
            raise ConfigError(
                f"max_tokens={self.max_tokens} must be at least 1, and needs instances that decode"
            )
        self._check_links(colocated)
        self._check_slowdowns()

    @classmethod
    def disaggregated(
        cls, prefill: Instances, num_prefill: int, decode: Instances, num_decode: int, **links: Any
    ) -> Deployment:
        """n prefill and m decode instances; ``links`` are the fields from kv_bytes_per_token on."""
        return cls("disaggregated", prefill, num_prefill, decode, num_decode, **links)

    @classmethod
    def prefill_alone(cls, times: Instances, num_instances: int) -> Deployment:
        """Requests end with their first token: the prefill phase of DistServe's Algorithm 1."""
        return cls("disaggregated", prefill=times, num_prefill=num_instances)

    @classmethod
    def decode_alone(cls, times: Instances, num_instances: int, **links: Any) -> Deployment:
        """Requests arrive with their first token: the decode phase of Algorithm 1."""
        return cls("disaggregated", decode=times, num_decode=num_instances, **links)

    @classmethod
    def colocated(
        cls, times: Instances, num_instances: int, chunk_tokens: int | None = None
    ) -> Deployment:
        """Instances that do both: prefill first, or chunked when ``chunk_tokens`` is given."""
        mode = "prefill_first" if chunk_tokens is None else "chunked"
        return cls(mode, decode=times, num_decode=num_instances, chunk_tokens=chunk_tokens)

    @property
    def prefill_instances(self) -> tuple[StepTimes, ...]:
        return _one_each(self.prefill, self.num_prefill)

    @property
    def decode_instances(self) -> tuple[StepTimes, ...]:
        return _one_each(self.decode, self.num_decode)

    def _check_links(self, colocated: bool) -> None:
        if not (math.isfinite(self.kv_bytes_per_token) and self.kv_bytes_per_token >= 0):
            raise ConfigError(f"kv_bytes_per_token={self.kv_bytes_per_token} must be at least 0")
        if not (math.isfinite(self.link_latency_s) and self.link_latency_s >= 0):
            raise ConfigError(f"link_latency_s={self.link_latency_s} must be at least 0")
        for name in ("link_bandwidth", "decode_link_bandwidth"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} must be above 0 bytes/s")
        # A transfer happens between two roles only: elsewhere these would change nothing.
        unused = colocated or self.num_decode == 0
        is_set = (
            self.kv_bytes_per_token > 0
            or self.link_latency_s > 0
            or self.decode_link_bandwidth is not None
            or not math.isinf(self.link_bandwidth)
        )
        if unused and is_set:
            raise ConfigError("only a deployment with decode instances of their own has KV links")

    def _check_slowdowns(self) -> None:
        for name in ("prefill_slowdown", "decode_slowdown"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value} must be at least 0")
            if value > 0 and not (self.num_prefill and self.num_decode):
                raise ConfigError(f"{name}={value} needs instances of both roles")
            everyone = (*self.prefill_instances, *self.decode_instances)
            if value > 0 and any(times.num_stages > 1 for times in everyone):
                raise ConfigError(f"{name}={value} is not modelled for pipelines")


def _check_instances(name: str, times: Instances, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ConfigError(f"num_{name}={count!r} must be a whole number of at least 0")
    given = len(times) if isinstance(times, tuple) else count if times is not None else 0
    if given != count:
        raise ConfigError(f"num_{name}={count}, but step times are given for {given}")


def _one_each(times: Instances, count: int) -> tuple[StepTimes, ...]:
    if times is None:
        return ()
    return times if isinstance(times, tuple) else (times,) * count
