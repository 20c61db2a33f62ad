"""DistServe's Figures 8, 9 and 11: systems side by side, over rates and SLO scales."""

from __future__ import annotations

import numpy as np
import pytest

from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.errors import InvalidParameter, ModelError
from daskserve.planner.ablation import SYSTEMS, ablation
from daskserve.planner.applications import application
from daskserve.planner.hardware import Cluster
from daskserve.planner.latency import DistServeA100
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.sweep import sweep

CHAT = application("chatbot-opt-13b")


def request(slo=CHAT.slo):
    return PlanRequest(
        ModelSpec.load(CHAT.model), Cluster.of("A100", 1, gpus_per_node=4), CHAT.all_lengths(), slo,
        latency=DistServeA100(), seeds=(0,),
    )  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return ablation(request(), Parallelism(1), DistServeA100("vllm"))


@pytest.mark.slow
def test_each_idea_adds_goodput(found):
    rates = found.table["rate_per_gpu"]
    assert tuple(found.table["system"].values) == SYSTEMS
    vllm, tuned, low, high = rates.values
    assert tuned >= vllm * 0.99
    assert low > vllm and high >= low * 0.97
    assert (found.table["low_per_gpu"] <= rates).all()
    assert "DistServe-High" in found._repr_html_()


@pytest.mark.slow
def test_systems_are_swept_per_gpu_over_rates_and_scales(found):
    shares = sweep(
        CHAT.all_lengths(), found.deployments, CHAT.slo, [0.5, 8.0], slo_scales=[0.5, 1.0, 1.5],
        seeds=[0], max_requests=2000, num_gpus=found.num_gpus,
    )  # fmt: skip
    attainment = shares["attainment"].isel(seed=0)
    assert attainment.dims == ("system", "rate", "slo_scale")
    assert (attainment.sel(rate=0.5, slo_scale=1.5) > 0.95).all()
    assert (attainment.diff("slo_scale") >= 0).all()
    assert (attainment.sel(rate=8.0, slo_scale=1.0) < 0.9).all()
    assert not np.isnan(attainment).any()


@pytest.mark.slow
def test_gpus_of_other_systems_are_refused(found):
    with pytest.raises(InvalidParameter, match="num_gpus"):
        sweep(CHAT.all_lengths(), found.deployments, CHAT.slo, [1.0], num_gpus={"vLLM": 1})


def test_a_parallelism_that_does_not_run_is_refused():
    with pytest.raises(ModelError, match="cannot run as TP3xPP1"):
        ablation(request(), Parallelism(3))


def test_a_limit_that_nothing_meets_leaves_systems_out():
    found = ablation(request(SLO(0.001, 0.1)), Parallelism(1))
    assert found.goodputs["vLLM"].status == "infeasible"
    assert "DistServe-High" not in found.units
    assert np.isnan(found.table["rate_per_gpu"]).all()
