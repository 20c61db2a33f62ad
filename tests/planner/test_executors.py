"""Candidates simulated elsewhere give what they give here, with any number of workers."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, LocalCluster

from daskserve.core.slo import SLO
from daskserve.planner.hardware import Cluster
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.planning import plan, plan_highest_rate
from daskserve.planner.replay import deployment_of_placement
from daskserve.planner.sweep import sweep
from daskserve.planner.workload import Workload

LOOPBACK = {
    "protocol": "tcp",
    "host": "127.0.0.1",
    "dashboard_address": "127.0.0.1:0",
    "worker_dashboard_address": "127.0.0.1:0",
    "threads_per_worker": 1,
}

LENGTHS = Workload.from_arrays([0.0] * 3, [200, 500, 900], [40, 100, 20])
REQUEST = PlanRequest(
    ModelSpec.load("llama-3.1-8b"), Cluster.of("H100", 1, gpus_per_node=4), LENGTHS,
    SLO(0.2, 0.03), rate=20.0, seeds=(0, 1),
)  # fmt: skip


def everything(executor=None):
    """A plan, a highest rate and a sweep."""
    planned = plan(REQUEST, executor)
    highest = plan_highest_rate(REQUEST, max_gpus=2, executor=executor)
    deployment = deployment_of_placement(planned.placement, REQUEST.model, REQUEST.step_source)
    rates, scales = [10.0, 40.0], [0.5, 1.0]
    swept = sweep(
        LENGTHS, deployment, REQUEST.slo, rates, slo_scales=scales, max_requests=3000,
        executor=executor,
    )  # fmt: skip
    return planned, highest, swept


@pytest.fixture(scope="module")
def here():
    return everything()


def check_same(here, there):
    for mine, theirs in zip(here[:2], there[:2], strict=True):
        assert mine.placement == theirs.placement
        assert mine.explanation == theirs.explanation
        assert mine.ranking.identical(theirs.ranking)
    assert here[2].identical(there[2])
    assert here[2]["attainment"].values.tobytes() == there[2]["attainment"].values.tobytes()
    assert np.isfinite(here[2]["attainment"]).all()


@pytest.mark.parametrize(
    "workers", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_a_dask_client_with_any_number_of_workers(here, workers):
    with (
        LocalCluster(n_workers=workers, processes=False, **LOOPBACK) as cluster,
        Client(cluster) as client,
    ):
        check_same(here, everything(client))


@pytest.mark.slow
def test_dask_workers_that_are_processes(here):
    with (
        LocalCluster(n_workers=2, **LOOPBACK) as cluster,
        Client(cluster) as client,
    ):
        check_same(here, everything(client))
