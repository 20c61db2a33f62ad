"""Runs the compiled event loop on a workload and a configuration."""

from __future__ import annotations

import numpy as np

from daskserve.errors import ConfigError, WorkloadError
from daskserve.planner.distserve import event_loop
from daskserve.planner.distserve.configuration import (
    Colocated,
    Configuration,
    phase_coefficients,
)
from daskserve.planner.distserve.latencies import RequestLatencies
from daskserve.planner.distserve.profile import ModelProfile
from daskserve.planner.workload import Workload


def simulate(
    profile: ModelProfile,
    configuration: Configuration,
    workload: Workload,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
) -> RequestLatencies:
    """Simulates a workload as DistServe's simulator does.

    Parameters
    ----------
    num_prefill, num_decode
        Instances of each phase. A colocated configuration has ``num_prefill`` of them and
        takes no ``num_decode``. The original's search always uses one of each.

    Raises
    ------
    ConfigError
        The published profile cannot run the configuration.
    WorkloadError
        A request is too long for any step: the original would never end.
    """
    arrival_s, prompt_tokens, output_tokens = workload.arrays()
    return simulate_arrays(
        profile,
        configuration,
        arrival_s * 1000.0,
        prompt_tokens,
        output_tokens,
        num_prefill,
        num_decode,
    )


def simulate_arrays(
    profile: ModelProfile,
    configuration: Configuration,
    arrival_ms: np.ndarray,
    prompt_tokens: np.ndarray,
    output_tokens: np.ndarray,
    num_prefill: int = 1,
    num_decode: int = 1,
) -> RequestLatencies:
    """:func:`simulate` on bare arrays, sorted by arrival, in the original's milliseconds."""
    colocated = isinstance(configuration, Colocated)
    _check_counts(num_prefill, num_decode, colocated)
    costs = _costs(profile, configuration)
    _check_lengths(prompt_tokens, output_tokens, costs)
    pipelines = [configuration.prefill[1]] * num_prefill
    if not colocated:
        pipelines += [configuration.decode[1]] * num_decode
    requests = _requests(arrival_ms, prompt_tokens, output_tokens)
    stages, heads = _stages(pipelines)
    event_loop.run(requests, stages, costs, heads[:num_prefill], heads[num_prefill:])
    decode_ms = requests["finished_ms"] - requests["first_token_ms"]
    return RequestLatencies(
        ttft_s=(requests["first_token_ms"] - arrival_ms) / 1000.0,
        decode_s=decode_ms / 1000.0,
        tpot_s=decode_ms / output_tokens / 1000.0,
    )


def _check_counts(num_prefill: int, num_decode: int, colocated: bool) -> None:
    if num_prefill < 1 or num_decode < 1:
        raise ConfigError(f"num_prefill={num_prefill}, num_decode={num_decode}: at least 1 each")
    if colocated and num_decode != 1:
        raise ConfigError("a colocated configuration has no decode instances; leave num_decode")


def _check_lengths(
    prompt_tokens: np.ndarray, output_tokens: np.ndarray, costs: event_loop.Costs
) -> None:
    """The original waits for ever for a request that no step can take."""
    if len(prompt_tokens) == 0:
        return
    for name, tokens in (("prompt", prompt_tokens), ("output", output_tokens)):
        if tokens.min() < 1:
            row = int(tokens.argmin())
            raise WorkloadError(f"request {row} has {tokens[row]} {name} tokens, not at least 1")
    if prompt_tokens.max() > costs.prefill_step_tokens:
        row = int(prompt_tokens.argmax())
        raise WorkloadError(
            f"request {row} has {prompt_tokens[row]} prompt tokens, a prefill step holds"
            f" {costs.prefill_step_tokens}; use more GPUs or drop it"
        )
    total = prompt_tokens + output_tokens
    if total.max() > event_loop.DECODE_STEP_TOKENS:
        row = int(total.argmax())
        raise WorkloadError(
            f"request {row} grows to {total[row]} tokens, a decode step holds"
            f" {event_loop.DECODE_STEP_TOKENS}; drop it"
        )


def _costs(profile: ModelProfile, configuration: Configuration) -> event_loop.Costs:
    prefill, decode = phase_coefficients(profile, configuration)
    capacity = profile.kv_capacity_tokens
    return event_loop.Costs(
        prefill=prefill.prefill,
        decode_small=decode.decode_small,
        decode_large=decode.decode_large,
        large_batch_from=decode.large_batch_from,
        prefill_share=1.0 / configuration.prefill[1],
        decode_share=1.0 / configuration.decode[1],
        prefill_stage_ms=float(configuration.prefill[1]),
        prefill_step_tokens=capacity[configuration.prefill],
        # In the original the capacity in tokens limits the number of requests here.
        decode_step_requests=capacity[configuration.decode],
    )


def _requests(
    arrival_ms: np.ndarray, prompt_tokens: np.ndarray, output_tokens: np.ndarray
) -> np.ndarray:
    requests = np.zeros(len(arrival_ms), event_loop.REQUEST)
    requests["arrival_ms"] = arrival_ms
    requests["prompt_tokens"] = prompt_tokens
    requests["output_tokens"] = output_tokens
    return requests


def _stages(pipelines: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Stages of pipelines of these lengths, each closed to a ring, and their first stages."""
    ends = np.cumsum(pipelines)
    heads = ends - pipelines
    stages = np.zeros(ends[-1], event_loop.STAGE)
    stages["event_ms"] = np.inf
    stages["next_stage"] = np.arange(1, ends[-1] + 1)
    stages["next_stage"][ends - 1] = heads
    stages["is_first"][heads] = 1
    stages["is_last"][ends - 1] = 1
    return stages, heads
