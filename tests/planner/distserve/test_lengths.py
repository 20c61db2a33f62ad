"""Synthetic data sets, and requests drawn from them as the original draws them."""

import csv

import numpy as np
import pytest

from daskserve.errors import ConfigError, WorkloadError
from daskserve.planner.distserve import draw_lengths, synthetic_lengths
from daskserve.planner.distserve.lengths import draw_arrivals_ms


@pytest.mark.parametrize(
    ("name", "num_rows", "prompt", "output"),
    [
        ("sharegpt", 5000, 747.9, 199.1),
        ("humaneval", 1640, 172.0, 96.1),
        ("longbench", 5000, 1733.6, 84.6),
    ],
)
def test_synthetic_lengths_have_the_stated_means(name, num_rows, prompt, output):
    lengths = synthetic_lengths(name)
    assert len(lengths) == num_rows
    assert lengths.mean(axis=0).round(1).tolist() == [prompt, output]


@pytest.mark.parametrize("name", ["sharegpt", "humaneval", "longbench"])
@pytest.mark.parametrize("num_requests", [300, 1000])
def test_draws_are_those_of_the_original(distserve_dir, name, num_requests):
    path = distserve_dir / "reference" / f"workload-{name}-n{num_requests}-seed0.csv"
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    prompt, output = draw_lengths(synthetic_lengths(name), num_requests, seed=0)
    assert prompt.tolist() == [int(row["prompt_len"]) for row in rows]
    assert output.tolist() == [int(row["output_len"]) for row in rows]
    written = [row["arrival_s_at_unit_rate"] for row in rows]
    arrival_s = [float(text.removeprefix("np.float64(").removesuffix(")")) for text in written]
    np.testing.assert_allclose(draw_arrivals_ms(num_requests, 1.0, 0) / 1000, arrival_s, rtol=1e-12)


def test_impossible_draws_are_refused():
    lengths = synthetic_lengths("humaneval")
    for num_requests in (0, len(lengths) + 1):
        with pytest.raises(WorkloadError, match=str(num_requests)):
            draw_lengths(lengths, num_requests, seed=0)
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(WorkloadError, match="rate"):
            draw_arrivals_ms(10, rate, seed=0)
    with pytest.raises(ConfigError, match="longbench"):
        synthetic_lengths("alpaca")
