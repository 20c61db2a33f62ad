from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from daskserve.errors import WorkloadError
from daskserve.planner.servegen import read_servegen
from daskserve.planner.traces import read_workload, reusable_prompt_share, spread


def written(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_azure(traces_dir):
    workload = read_workload(traces_dir / "azure2023" / "AzureLLMInferenceTrace_conv.csv.gz")
    arrival, prompt, output = workload.arrays()
    assert len(workload) == 19366 and arrival[0] == 0
    assert round(workload.rate, 2) == 5.53
    assert (round(prompt.mean()), round(output.mean())) == (1155, 211)


def test_mooncake_is_spread_over_its_clock_and_keeps_prefixes(traces_dir):
    path = traces_dir / "mooncake" / "conversation_trace.jsonl.gz"
    workload = read_workload(path)
    raw = read_workload(path, spread_s=0)
    gaps = np.diff(workload.arrays()[0])
    assert (gaps == 0).mean() < 0.01 < 0.8 < (np.diff(raw.arrays()[0]) == 0).mean()
    assert 0.9 < gaps.std() / gaps.mean() < 1.1
    assert np.abs(workload.arrays()[0] - raw.arrays()[0]).max() <= 3.1
    assert round(reusable_prompt_share(workload), 3) == 0.374


def test_mooncake_synthetic_is_left_alone(traces_dir):
    path = traces_dir / "mooncake" / "synthetic_trace.jsonl.gz"
    workload = read_workload(path)
    assert (workload.arrays()[0] == read_workload(path, spread_s=0).arrays()[0]).all()
    assert round(reusable_prompt_share(workload), 3) == 0.651


def test_distserve_workload(traces_dir):
    folder = traces_dir.parent / "distserve" / "reference"
    workload = read_workload(folder / "workload-sharegpt-n300-seed0.csv")
    assert len(workload) == 300 and workload.arrays()[1][0] == 1145


def test_lengths_without_times_can_be_resampled(traces_dir):
    workload = read_workload(traces_dir / "lengths" / "bwb_llama2_etalon.csv.gz")
    assert workload.rate is None
    drawn = workload.resample(2000, 5.0, seed=1)
    _, prompt, output = drawn.arrays()
    assert np.corrcoef(prompt, output)[0, 1] > 0.6  # lengths are drawn together
    with pytest.raises(WorkloadError, match="no rate"):
        workload.scaled_to(1.0)


def test_servegen_window(traces_dir):
    folder = traces_dir / "servegen"
    names = ("reason-deepseek-r1-rates.csv.gz", "reason-deepseek-r1-lengths-by-client.csv.gz")
    workload = read_servegen(folder / names[0], folder / names[1], 36_000, 1200, seed=3)
    again = read_servegen(folder / names[0], folder / names[1], 36_000, 1200, seed=3)
    assert (workload.arrays()[1] == again.arrays()[1]).all()
    assert 4 < workload.rate < 45 and workload.arrays()[2].mean() > 800
    with pytest.raises(WorkloadError, match="no data"):
        read_servegen(folder / names[0], folder / names[1], 1e7)


def test_plain_jsonl_and_gzip(tmp_path):
    rows = [{"arrival_s": t, "prompt_tokens": 10, "output_tokens": 5} for t in (0.5, 1.5)]
    text = "\n".join(json.dumps(row) for row in rows)
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert read_workload(path).arrays()[0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no data"),
        ("arrival_s,prompt_tokens,output_tokens\n", "no data"),
        ("arrival_s,output_tokens\n0,5\n", "no column for prompt lengths"),
        ("arrival_s,prompt_tokens,output_tokens\n5,1,1\n4,1,1\n", "line 3.*sort by time"),
        ("arrival_s,prompt_tokens,output_tokens\n0,0,1\n", "line 2: prompt_tokens=0"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1.5,1\n", "line 2: prompt_tokens=1.5"),
        ("arrival_s,prompt_tokens,output_tokens\nnan,1,1\n", "'nan' is not a number"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1\n", "line 2: output_tokens=None"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "not a date"),
    ],
)
def test_bad_files_name_the_line(tmp_path, text, message):
    with pytest.raises(WorkloadError, match=message):
        read_workload(written(tmp_path, text))


def test_bad_jsonl_and_missing_file(tmp_path):
    with pytest.raises(WorkloadError, match="line 1 is not JSON"):
        read_workload(written(tmp_path, "{", "t.jsonl"))
    with pytest.raises(WorkloadError, match="cannot read"):
        read_workload(tmp_path / "absent.csv")


def test_single_row_has_lengths_but_no_rate(tmp_path):
    workload = read_workload(written(tmp_path, "prompt_tokens,output_tokens\n7,3\n"))
    assert workload.rate is None
    assert workload.resample(100, 2.0, seed=0).rate == pytest.approx(2.0)


def test_spread_keeps_order_and_leaves_fine_clocks():
    fine = np.array([0.0, 0.1, 0.1, 0.4])
    assert (spread(fine) == fine).all()
    coarse = np.repeat([0.0, 3.0, 6.0], 5)
    apart = spread(coarse, seed=1)
    assert (np.diff(apart) >= 0).all() and (apart - coarse).max() < 3.0
