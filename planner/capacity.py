"""Where to start looking for a rate: what a deployment could compute if it never waited."""

from __future__ import annotations

from daskserve.planner.simulator import Deployment
from daskserve.planner.slo_classes import SLOClasses
from daskserve.planner.step_times import StepTimes
from daskserve.planner.workload import Workload


def capacity_guess(workload: Workload, deployment: Deployment, slo: SLOClasses) -> float:
    """Requests/s of full batches within the tightest TPOT limit; an estimate, not a bound."""
    _, prompt, output = workload.arrays()
    prompt_tokens, output_tokens = float(prompt.mean()), float(output.mean())
    prefill = sum(_prefill_rate(times, prompt_tokens) for times in deployment.prefill_instances)
    decode = sum(
        _decode_rate(times, prompt_tokens, output_tokens, float(slo.tpot_s.min()))
        for times in deployment.decode_instances
    )
    if deployment.mode != "disaggregated":
        both = [_prefill_rate(times, prompt_tokens) for times in deployment.decode_instances]
        return 1 / (1 / sum(both) + 1 / decode)
    return min(rate for rate in (prefill, decode) if rate > 0)


def _prefill_rate(times: StepTimes, prompt_tokens: float) -> float:
    count = max(1, int(times.prefill_budget_tokens // prompt_tokens))
    pass_s = times.prefill_s(count * prompt_tokens, count * prompt_tokens**2, count)
    return count / max(times.stage_s(pass_s), 1e-9)


def _decode_rate(
    times: StepTimes, prompt_tokens: float, output_tokens: float, tpot_s: float
) -> float:
    context = prompt_tokens + output_tokens / 2
    fits = int(times.kv_capacity_tokens / (times.num_stages * context))
    batch = max(1, min(times.max_batch_size, fits))
    while batch > 1 and times.latency_s(times.decode_s(batch, batch * context)) > tpot_s:
        batch = batch * 3 // 4
    step_s = times.latency_s(times.decode_s(batch, batch * context))
    return times.num_stages * batch / max(step_s, 1e-9) / max(output_tokens - 1, 1)
