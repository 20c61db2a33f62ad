"""Step times and traces that the tests of the simulator share."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from daskserve.planner.step_times import StepTimes
from daskserve.planner.workload import Workload


def make_times(**changes) -> StepTimes:
    """An instance of a middling model: 55 ms for 1,024 prompt tokens, 12 ms per decode step."""
    most = changes.pop("max_batch", 64)
    fields = dict(
        prefill_knots_tokens=np.array([0.0, 64, 512, 1024, 2048]),
        prefill_knots_s=np.array([0.01, 0.012, 0.03, 0.055, 0.11]),
        prefill_quadratic_s=1e-9,
        prefill_per_prompt_s=0.001,
        decode_base_s=np.r_[0.0, 0.012 + 0.0001 * np.arange(1, most + 1)],
        decode_per_context_s=np.full(most + 1, 4e-8),
        kv_capacity_tokens=100_000,
        prefill_budget_tokens=1024,
    )
    return StepTimes(**(fields | changes))


def make_workload(num_requests, rate, seed=0, prompt=(1, 1500), output=(1, 300)) -> Workload:
    """Poisson arrivals, lengths uniform between limits."""
    random = np.random.default_rng(seed)
    arrival = np.cumsum(random.exponential(1 / rate, num_requests))
    prompts = random.integers(prompt[0], prompt[1] + 1, num_requests)
    outputs = random.integers(output[0], output[1] + 1, num_requests)
    return Workload.from_arrays(arrival, prompts, outputs)


@pytest.fixture
def step_times():
    return make_times


@pytest.fixture
def workload():
    return make_workload


def _module(name: str):
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def virtual_cluster():
    """A `VirtualCluster` of a deployment, with pipelines where it has stages.

    The engine's KV pool needs torch.
    """
    pytest.importorskip("torch")
    engine = _module("virtual_engine")
    pipelined = _module("virtual_pipeline").pipelined(engine)

    def make(deployment):
        has_stages = deployment.decode_instances[0].num_stages > 1
        return (pipelined if has_stages else engine.VirtualCluster)(deployment)

    return make
