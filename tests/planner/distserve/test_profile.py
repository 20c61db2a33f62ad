"""The published numbers, as shipped."""

import csv
import json

import pytest

from daskserve.errors import ConfigError
from daskserve.planner.distserve import Colocated, Disaggregated, model_profile
from daskserve.planner.distserve.configuration import phase_coefficients, why_not_runnable


def test_shipped_coefficients_are_the_published_ones(distserve_dir):
    for backend in ("distserve", "vllm"):
        path = distserve_dir / f"profiler-a100-80g.{backend}.json"
        for model, rows in json.loads(path.read_text()).items():
            shipped = model_profile(model).coefficients[backend]
            assert sorted(rows) == sorted(str(tp) for tp in shipped)
            for tp, row in rows.items():
                assert list(shipped[int(tp)].prefill) == row["prefill"]
                assert list(shipped[int(tp)].decode_small) == row["decoding_smallbs"]
                assert list(shipped[int(tp)].decode_large) == row["decoding_largebs"]
                assert shipped[int(tp)].large_batch_from == row["decoding_large_small_bs_threshold"]


def test_shipped_capacities_are_the_published_ones(distserve_dir):
    published = {}
    with open(distserve_dir / "max_num_tokens.csv", newline="") as file:
        for row in csv.DictReader(file):
            degrees = (int(row["tp"]), int(row["pp"]))
            published.setdefault(row["model"], {})[degrees] = int(row["max_num_tokens"])
    shipped = {name: model_profile(name).kv_capacity_tokens for name in published}
    assert shipped == published


def test_an_unknown_model_is_answered_with_those_that_exist():
    with pytest.raises(ConfigError, match="facebook/opt-66b"):
        model_profile("gpt-2")


def test_a_configuration_without_published_data_says_which_is_missing():
    profile = model_profile("facebook/opt-13b")
    assert "TP=3 PP=1" in why_not_runnable(profile, Colocated(3, 1))
    assert "decode TP=5" in why_not_runnable(profile, Disaggregated(1, 1, 1, 5, 1))
    assert why_not_runnable(profile, Disaggregated(1, 2, 1, 1, 1)) is None
    with pytest.raises(ConfigError, match="OPT-175B|opt-175b"):
        phase_coefficients(model_profile("facebook/opt-175b"), Colocated(8, 1))


@pytest.mark.parametrize("degree", [0, -1, 1.5, True])
def test_degrees_are_positive_whole_numbers(degree):
    with pytest.raises(ConfigError, match="pp_prefill"):
        Disaggregated(1, 1, degree, 1, 1)
