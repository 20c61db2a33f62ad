"""The bisection and the joint enumeration against what the original found."""

import json

import numpy as np
import pytest

from daskserve.core.slo import SLO
from daskserve.errors import ConfigError, WorkloadError
from daskserve.planner.distserve import (
    Colocated,
    Disaggregated,
    SearchSettings,
    colocated_configurations,
    joint_configurations,
    joint_search,
    model_profile,
    search_goodput,
    synthetic_lengths,
)

OPT_13B = model_profile("facebook/opt-13b")
OPT_66B = model_profile("facebook/opt-66b")
SHAREGPT = synthetic_lengths("sharegpt")
CHAT = SLO(ttft_s=0.2, tpot_s=0.1)


def test_the_example_of_the_original_needs_no_files():
    found = joint_search(
        OPT_13B, joint_configurations(OPT_13B, 1, 4, high_affinity=False), SHAREGPT, CHAT
    )
    assert found.best == [Disaggregated(1, 2, 1, 1, 1)]
    assert found.goodput_per_gpu == {
        Disaggregated(1, 1, 1, 1, 1): 0.625,
        Disaggregated(1, 1, 1, 1, 2): 0.3125,
        Disaggregated(1, 1, 1, 2, 1): 0.3125,
        Disaggregated(1, 1, 2, 1, 1): 1.25,
        Disaggregated(1, 1, 2, 1, 2): 0.9375,
        Disaggregated(1, 1, 2, 2, 1): 0.9375,
        Disaggregated(1, 2, 1, 1, 1): 2.03125,
        Disaggregated(1, 2, 1, 1, 2): 1.5625,
        Disaggregated(1, 2, 1, 2, 1): 1.5625,
    }


def test_every_published_search_is_reproduced(distserve_dir):
    lines = (distserve_dir / "reference" / "search.jsonl").read_text().splitlines()
    assert len(lines) == 3
    for row in map(json.loads, lines):
        profile = OPT_13B if row["model"] == "opt_13b" else OPT_66B
        if row["backend"] == "vllm":
            candidates = colocated_configurations(profile, row["nn"] * row["ng"])
            kind = Colocated
        else:
            candidates = joint_configurations(profile, row["nn"], row["ng"], high_affinity=False)
            kind = Disaggregated
        found = joint_search(
            profile,
            candidates,
            SHAREGPT,
            SLO(row["ttft"] / 1000, row["tpot"] / 1000),
            SearchSettings(row.get("maxr", 5), row.get("esp", 0.25)),
        )
        assert found.goodput_per_gpu == {kind(*degrees): rate for degrees, rate in row["all"]}
        best, rate = row["best"]
        assert kind(*best) in found.best
        assert found.goodput_per_gpu[kind(*best)] == rate


@pytest.mark.parametrize(
    ("high_affinity", "num_found", "num_runnable"), [(True, 569, 191), (False, 133, 103)]
)
def test_enumeration_of_a_large_cluster(high_affinity, num_found, num_runnable):
    found = joint_configurations(OPT_13B, 4, 8, high_affinity=high_affinity)
    assert len(found) == len(set(found)) == num_found
    assert all(configuration.num_gpus <= 32 for configuration in found)
    no_probes = SearchSettings(max_rate_per_gpu=5.0, resolution=5.0)
    result = joint_search(OPT_13B, found, SHAREGPT, CHAT, no_probes)
    assert len(result.goodput_per_gpu) == num_runnable
    assert len(result.not_runnable) == num_found - num_runnable
    assert result.best == []


def test_ties_are_all_reported():
    settings = SearchSettings(max_rate_per_gpu=1.0, resolution=0.6)
    names = [Disaggregated(1, 2, 1, 1, 1), Disaggregated(1, 1, 2, 1, 1), Colocated(4, 1)]
    found = joint_search(OPT_13B, names, SHAREGPT, CHAT, settings)
    assert set(found.goodput_per_gpu.values()) == {0.5}
    assert found.best == names[:2]  # three GPUs each; the third has four


def test_a_limit_that_nothing_meets_has_no_best():
    impossible = SLO(ttft_s=0.001, tpot_s=0.001)
    assert search_goodput(OPT_13B, Colocated(1, 1), SHAREGPT, impossible) == 0.0
    assert joint_search(OPT_13B, [Colocated(1, 1)], SHAREGPT, impossible).best == []


def test_a_looser_limit_never_lowers_the_rate():
    rates = [
        search_goodput(OPT_13B, Disaggregated(1, 2, 1, 1, 1), SHAREGPT, SLO(ttft_s, 0.1))
        for ttft_s in (0.1, 0.15, 0.2, 0.4)
    ]
    assert rates == sorted(rates)


def test_lengths_without_tokens_are_refused():
    with pytest.raises(WorkloadError, match="request 0 has 0 output tokens"):
        search_goodput(
            OPT_13B, Colocated(1, 1), np.array([[5, 0]]), CHAT, SearchSettings(num_requests=1)
        )


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_settings_must_be_positive_numbers(value):
    with pytest.raises(ConfigError, match="resolution"):
        SearchSettings(resolution=value)
    with pytest.raises(ConfigError, match="max_rate_per_gpu"):
        SearchSettings(max_rate_per_gpu=value)


@pytest.mark.slow
def test_the_large_joint_search_is_the_same_in_any_order():
    candidates = joint_configurations(OPT_13B, 4, 8, high_affinity=True)
    forward = joint_search(OPT_13B, candidates, SHAREGPT, CHAT)
    shuffled = list(np.random.default_rng(0).permutation(len(candidates)))
    backward = joint_search(OPT_13B, [candidates[i] for i in shuffled], SHAREGPT, CHAT)
    assert forward.goodput_per_gpu == backward.goodput_per_gpu
    assert (
        set(forward.best)
        == set(backward.best)
        == {
            Disaggregated(1, 4, 4, 1, 4),
            Disaggregated(1, 4, 4, 2, 2),
        }
    )
