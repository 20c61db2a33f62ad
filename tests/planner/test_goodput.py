"""The highest rate that holds in the long run, and the answers that are not a rate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.errors import InvalidParameter
from daskserve.planner.applications import application
from daskserve.planner.arrivals import Bursts
from daskserve.planner.goodput import goodput, probe_rate
from daskserve.planner.hardware import gpu_named
from daskserve.planner.latency import DistServeA100
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.simulator import Deployment, simulate
from daskserve.planner.simulator.driving import run_arrays
from daskserve.planner.simulator.result import STAGES
from daskserve.planner.stationarity import most_requests, requests_needed
from daskserve.planner.step_times import StepTimes
from daskserve.planner.sweep import sweep
from daskserve.planner.workload import Workload

SERVICE_S = 0.05


def fixed_times(**changes) -> StepTimes:
    """One prompt at a time in 50 ms; decode steps of 10 ms and 0.1 ms more per request."""
    fields = dict(
        prefill_knots_tokens=[0, 512],
        prefill_knots_s=[SERVICE_S, SERVICE_S],
        prefill_quadratic_s=0.0,
        decode_base_s=np.r_[0, 0.010 + 1e-4 * np.arange(1, 65)],
        decode_per_context_s=np.zeros(65),
        prefill_budget_tokens=1,
        kv_capacity_tokens=64 * 640,
    )
    return StepTimes(**(fields | changes))


TRACE = Workload.uniform(1000, 10, 512, 64)
PREFILL = Deployment.prefill_alone(fixed_times(), 1)
BOTH = Deployment.disaggregated(fixed_times(), 2, fixed_times(), 1)


def lindley_attainment(rate, ttft_s, num_requests=300_000):
    gaps = np.random.default_rng(99).exponential(1 / rate, num_requests)
    # The recursion in closed form: the walk above its running minimum.
    walk = np.concatenate([[0.0], np.cumsum(SERVICE_S - gaps)])
    waits = walk - np.minimum.accumulate(walk)
    return (waits + SERVICE_S <= ttft_s).mean()


@pytest.mark.parametrize("ttft_s", [0.12, 0.5])
def test_the_rate_is_where_queueing_theory_has_it(ttft_s):
    answer = goodput(TRACE, PREFILL, SLO(ttft_s, 1.0))
    assert answer.status == "found"
    assert answer.low <= answer.rate <= answer.high
    assert answer.limited_by == "ttft"
    assert lindley_attainment(answer.rate, ttft_s) == pytest.approx(0.9, abs=0.02)


def test_a_short_horizon_cannot_flatter():
    """At 3 % above capacity 300 requests look fine; the answer stays below capacity."""
    slo = SLO(ttft_s=2.0, tpot_s=1.0)
    rate = 1.03 / SERVICE_S
    short = [
        simulate(TRACE.resample(300, rate, seed), PREFILL).attainment(slo) for seed in range(5)
    ]
    assert np.mean(short) > 0.9
    assert goodput(TRACE, PREFILL, slo).rate < 1 / SERVICE_S


def test_the_published_model_at_a_rate_that_flatters_for_300_requests():
    """OPT-13B, ShareGPT-like lengths, 6 requests/s: nearly all met at first, few in the end."""
    chat = application("chatbot-opt-13b")
    model, gpu = ModelSpec.load("opt-13b"), gpu_named("A100")
    times = {tp: DistServeA100().step_times(model, gpu, Parallelism(tp, 1)) for tp in (1, 2)}
    deployment = Deployment.disaggregated(times[2], 1, times[1], 1)
    trace = chat.workload(5000, rate=1.0)

    def share(count):
        runs = [simulate(trace.resample(count, 6.0, seed), deployment) for seed in (0, 1)]
        return np.mean([run.attainment(chat.slo) for run in runs])

    assert share(300) > 0.9
    assert share(3000) < 0.4
    assert goodput(trace, deployment, chat.slo, seeds=[0]).rate < 6.0


def test_limits_that_tolerate_a_long_queue_do_not_hide_that_it_grows():
    answer = goodput(TRACE, PREFILL, SLO(ttft_s=1000.0, tpot_s=1.0))
    assert answer.limited_by == "stability"
    assert 0.95 / SERVICE_S < answer.rate < 1.01 / SERVICE_S


def test_decode_is_limited_by_its_pace():
    answer = goodput(TRACE, Deployment.decode_alone(fixed_times(), 1), SLO(1.0, 0.0125))
    assert answer.limited_by == "tpot"
    # 25 requests at once take 12.5 ms per token: 63 steps each.
    assert answer.rate < 25 / (63 * 0.0125)


def test_the_cap_is_tried_and_met():
    answer = goodput(TRACE, PREFILL, SLO(1.0, 1.0), max_rate=5.0)
    assert (answer.status, answer.rate, answer.high) == ("at_least_cap", 5.0, None)
    assert all(
        any(p.rate == 5.0 and p.verdict == "met" for p in [probe]) for probe in answer.probes
    )


def test_a_cap_above_the_answer_changes_nothing():
    free = goodput(TRACE, PREFILL, SLO(0.2, 1.0), seeds=[0])
    capped = goodput(TRACE, PREFILL, SLO(0.2, 1.0), seeds=[0], max_rate=19.0)
    assert capped.status == "found"
    assert capped.low <= free.high and free.low <= capped.high


@pytest.mark.parametrize("slo", [SLO(0.001, 1.0), SLO(1.0, 0.001)])
def test_infeasible_says_what_could_be_reached(slo):
    answer = goodput(TRACE, BOTH, slo)
    assert (answer.status, answer.rate) == ("infeasible", None)
    assert answer.best.attainment == 0
    feasible = SLO(1.01 * answer.best.ttft_s, 1.01 * answer.best.tpot_s)
    assert goodput(TRACE, BOTH, feasible, seeds=[0]).status == "found"


def test_requests_that_fit_nowhere_are_named():
    tiny = Deployment.colocated(fixed_times(kv_capacity_tokens=520), 1)
    answer = goodput(TRACE, tiny, SLO(1, 1))
    assert answer.status == "infeasible"
    assert "KV memory" in answer.reason


def test_an_empty_workload_is_no_data():
    assert goodput(Workload.from_arrays([], [], []), PREFILL, SLO(1, 1)).status == "no_data"


class Broken:
    def sample(self, num_requests, rate, generator):
        raise ZeroDivisionError("the fit is broken")


class AllAtOnce:
    def sample(self, num_requests, rate, generator):
        return np.zeros(num_requests)


def test_a_crash_is_an_error_and_not_infeasible():
    answer = goodput(TRACE, PREFILL, SLO(1, 1), arrivals=Broken())
    assert answer.status == "error"
    assert "the fit is broken" in answer.reason


def test_what_never_settles_is_unstable():
    answer = goodput(
        TRACE, PREFILL, SLO(1e6, 1), arrivals=AllAtOnce(), seeds=[0], max_requests=1500
    )
    assert (answer.status, answer.rate) == ("unstable", None)
    assert {probe.verdict for probe in answer.probes} == {"unstable"}


def test_more_gpus_never_lower_it():
    slo = SLO(0.2, 0.0145)
    answers = [
        goodput(TRACE, Deployment.disaggregated(fixed_times(), n, fixed_times(), m), slo)
        for n, m in ((1, 1), (2, 1), (2, 2), (3, 2))
    ]
    for fewer, more in zip(answers, answers[1:], strict=False):
        assert more.high >= fewer.low
    assert answers[-1].rate > 1.5 * answers[0].rate


def test_looser_limits_never_lower_it():
    answers = [goodput(TRACE, BOTH, SLO(0.12 * k, 0.0115 * k)) for k in (1, 1.1, 1.5, 3)]
    for tighter, looser in zip(answers, answers[1:], strict=False):
        assert looser.high >= tighter.low
    assert answers[-1].rate > answers[0].rate


def test_bursts_are_judged_over_many_of_them():
    """A run of a thousand requests may see two bursts: whichever they are would decide."""
    bursts, slo = Bursts(9.0, 41.0, 0.0), SLO(0.3, 0.0145)
    for seed in (0, 1):
        probes = [
            probe_rate(TRACE, BOTH, slo, rate, seed, 100_000, bursts) for rate in (1, 3, 5, 8, 16)
        ]
        assert all(probe.num_requests >= 40 * 50 * probe.rate - 2 for probe in probes[1:])
        shares = [probe.attainment for probe in probes]
        assert shares == sorted(shares, reverse=True) and shares[0] > 0.9 > 0.2 > shares[-1]


def test_very_high_rates_settle_within_the_longest_run():
    """Ten lives of a request would be far above max_requests; four of so many are enough."""
    done = run_arrays(BOTH, *TRACE.arrays())[0]
    life_s = float(np.mean(sum(done[name] for name in STAGES)))
    slo, rate = SLO(0.2, 0.03), 1e5
    needed = requests_needed(rate, slo, done)
    assert needed == pytest.approx(4 * rate * life_s, rel=0.01)
    assert 100_000 < needed < most_requests(rate, slo, 64, 100_000) <= 1_000_000
    assert most_requests(5.0, slo, 64, 100_000) == 100_000


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.floats(0.12, 0.6), st.floats(0.0115, 0.02),
    st.sampled_from(["ttft", "tpot", "decode", "both"]),
)  # fmt: skip
@pytest.mark.slow
def test_more_of_anything_never_lowers_it(num_prefill, num_decode, ttft_s, tpot_s, more):
    """More GPUs or looser limits, whatever there was before; 5 % is the noise of one seed.

    Not so prefill alone: a queue before it smooths what reaches decode, and may help a tight TPOT.
    """

    def rate(n, m, ttft, tpot):
        deployment = Deployment.disaggregated(fixed_times(), n, fixed_times(), m)
        return goodput(TRACE, deployment, SLO(ttft, tpot), seeds=[0]).rate

    before = rate(num_prefill, num_decode, ttft_s, tpot_s)
    after = rate(
        num_prefill + (more == "both"), num_decode + (more in ("decode", "both")),
        ttft_s * (1.5 if more == "ttft" else 1), tpot_s * (1.5 if more == "tpot" else 1),
    )  # fmt: skip
    assert after >= 0.95 * before


def test_the_same_seeds_give_the_same_answer():
    slo = SLO(0.2, 0.0145)
    first, again, other = (goodput(TRACE, BOTH, slo, seeds=[seed]) for seed in (7, 7, 8))
    assert first == again != other


@pytest.mark.parametrize(
    "options",
    [
        dict(max_rate=0.0),
        dict(max_rate=math.nan),
        dict(max_rate=math.inf),
        dict(seeds=[]),
        dict(tolerance=0.0),
        dict(max_requests=10),
    ],
)
def test_options_that_make_no_sense(options):
    with pytest.raises(InvalidParameter):
        goodput(TRACE, PREFILL, SLO(1, 1), **options)


def test_a_sweep_over_rates_and_scales():
    shares = sweep(
        TRACE, BOTH, SLO(0.2, 0.0145), [0.0, 5.0, 20.0, 60.0], slo_scales=[0.8, 1, 2],
        max_requests=4000,
    )  # fmt: skip
    assert shares["attainment"].dims == ("rate", "slo_scale", "seed")
    assert np.isnan(shares["attainment"].sel(rate=0.0)).all()
    known = shares.sel(rate=[5.0, 20.0, 60.0]).mean("seed")
    assert (known["attainment"].diff("slo_scale") >= 0).all()
    assert (known["attainment"].diff("slo_scale") > 0.01).any()
    assert (known["attainment"].diff("rate") <= 0).all()
    assert (known["attainment"] <= known["ttft_attainment"]).all()
    assert shares["is_steady"].sel(rate=5.0).all()
    assert not shares["is_steady"].sel(rate=60.0).any()


@pytest.mark.parametrize("rates", [[], [-1.0], [math.nan]])
def test_sweeps_that_make_no_sense(rates):
    with pytest.raises(InvalidParameter, match="rates"):
        sweep(TRACE, BOTH, SLO(1, 1), rates)
