from __future__ import annotations

import pytest
import yaml
from click.testing import CliRunner

from daskserve.cli import main
from daskserve.planner.plan_file import read_plan

LENGTHS = ["--prompt-tokens", "300", "--output-tokens", "40"]
SLO = ["--ttft", "250ms", "--tpot", "0.05"]
PLAN = ["plan", "--model", "llama-3.1-8b", "--gpus", "H100:2x2", "--seeds", "1"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words])


def test_plan_writes_what_simulate_reads(run, tmp_path):
    planned = run(*PLAN, *LENGTHS, *SLO, "--rate", "15", "--report", "plan.json")
    assert planned.exit_code == 0, planned.output
    report = read_plan(tmp_path / "plan.json")
    assert "limited by" in report.chosen.binding and report.rate == 15
    assert [len(curve.rates) for curve in report.curves] == [8, 8] and len(report.front) == 14
    assert "placement written to placement.yaml" in planned.output
    assert "Runner-up" in planned.output and "$/M tokens" in planned.output
    assert yaml.safe_load((tmp_path / "placement.yaml").read_text())["model"] == "llama-3.1-8b"
    words = [*LENGTHS, *SLO, "--seeds", "1", "--requests", "5000"]
    met = run("simulate", "placement.yaml", *words, "--rate", "15", "--timeline", "t.csv")
    assert met.exit_code == 0, met.output
    assert "target 90%" in met.output and "ttft" in met.output
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert len(lines) == 5001 and lines[0].startswith("request,arrival_s,prefill_queue_s")
    overloaded = run("simulate", "placement.yaml", *words, "--rate", "900")
    assert overloaded.exit_code == 3


def test_an_unreachable_slo_exits_3_and_writes_nothing(run, tmp_path):
    answer = run(*PLAN, *LENGTHS, "--rate", "5", "--ttft", "1ms", "--tpot", "0.05")
    assert answer.exit_code == 3
    assert "nearest SLO that can be met is TTFT 0.0" in answer.output
    assert not (tmp_path / "placement.yaml").exists()


def test_milliseconds_by_mistake_are_warned_about(run):
    answer = run(*PLAN, *LENGTHS, "--rate", "5", "--ttft", "200", "--tpot", "0.05")
    assert "warning: TTFT 200 is read as 200 seconds; write 200ms" in answer.output


def test_a_replayed_trace(run, tmp_path):
    rows = "".join(f"{i * 0.1:.1f},300,20\n" for i in range(500))
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    planned = run(*PLAN, "--workload", "trace.csv", *SLO)
    assert planned.exit_code == 0, planned.output
    replayed = run("simulate", "placement.yaml", "--workload", "trace.csv", *SLO)
    assert replayed.exit_code == 0 and "500 requests" in replayed.output
    refused = run("simulate", "placement.yaml", "--workload", "trace.csv", *SLO, "--seeds", "2")
    assert refused.exit_code == 1 and "--seeds is for traces drawn" in refused.output


def test_highest_rate_within_a_budget(run):
    answer = run(*PLAN, *LENGTHS, *SLO, "--highest-rate", "--budget", "6")
    assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --workload FILE, or both"),
        ([*LENGTHS], "give --ttft"),
        ([*LENGTHS, *SLO], "no data.*give --rate"),
        ([*LENGTHS, *SLO, "--rate", "-1"], "rate=-1"),
        ([*LENGTHS, *SLO, "--rate", "nan"], "rate=nan"),
        ([*LENGTHS, "--ttft", "0", "--tpot", "1", "--rate", "1"], "ttft_s=0"),
        ([*LENGTHS, "--ttft", "soon", "--tpot", "1", "--rate", "1"], "'soon' is not a duration"),
        ([*LENGTHS, *SLO, "--rate", "1", "--attainment", "90"], "attainment=90"),
        ([*LENGTHS, *SLO, "--rate", "1", "--max-gpus", "4"], "--max-gpus goes with"),
        ([*LENGTHS, *SLO, "--rate", "1", "--budget", "4"], "--budget goes with"),
        ([*LENGTHS, *SLO, "--rate", "1", "--highest-rate"], "leave --rate out"),
        ([*LENGTHS, *SLO, "--highest-rate", "--objective", "price"], "--objective is for"),
        ([*LENGTHS, *SLO, "--rate", "1", "--workload", "x.csv"], "not both"),
        ([*SLO, "--workload", "absent.csv"], "cannot read absent.csv"),
        ([*LENGTHS, *SLO, "--rate", "1", "--latency", "magic"], "'magic' is no file"),
        ([*LENGTHS, *SLO, "--rate", "1", "--gpus", "V100:8"], "unknown GPU 'V100'"),
        ([*LENGTHS, *SLO, "--rate", "1", "--gpus", "H100:8by4"], "must look like H100:8x4"),
        ([*LENGTHS, *SLO, "--rate", "1", "--network-gbps", "0"], "network_bandwidth=0"),
        ([*LENGTHS, *SLO, "--rate", "1", "--objective", "price"], "one GPU type is the same"),
        ([*LENGTHS, *SLO, "--rate", "1", "--latency", "distserve-a100"], "of the A100, not of"),
        ([*LENGTHS, *SLO, "--rate", "1", "--application", "chatbot-opt-13b"], "leave it out"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(run, words, message):
    answer = run(*PLAN, *words)
    assert answer.exit_code == 1
    assert not isinstance(answer.exception, Exception)
    import re

    assert re.search(message, answer.output), answer.output


def test_the_network_of_a_single_node_changes_nothing_and_is_refused(run):
    words = ["plan", "--model", "opt-13b", "--gpus", "A100:4", *LENGTHS, *SLO, "--rate", "1"]
    answer = run(*words, "--network-gbps", "25")
    assert answer.exit_code == 1 and "single node" in answer.output


def test_an_application_is_planned_and_simulated(run):
    words = ["--application", "chatbot-opt-13b", "--latency", "distserve-a100", "--rate", "4",
             "--seeds", "1"]  # fmt: skip
    planned = run("plan", "--gpus", "A100:4", *words)
    assert planned.exit_code == 0, planned.output
    met = run("simulate", "placement.yaml", *words, "--requests", "5000")
    assert met.exit_code == 0 and "TTFT 0.25 s" in met.output
    refused = run("simulate", "placement.yaml", *words, "--ttft", "1")
    assert refused.exit_code == 1 and "--application sets --ttft" in refused.output


def test_requests_that_are_left_out_are_counted(run, tmp_path):
    rows = "0,300,20\n1,200000,20\n2,300,20\n"
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    words = [*PLAN, "--workload", "trace.csv", *SLO, "--rate", "2"]
    assert "1 of 3 requests are longer" in run(*words).output
    answer = run(*words, "--drop-too-long")
    assert answer.exit_code == 0 and "1 of 3 requests are longer" in answer.output


def test_bad_placements(run, tmp_path):
    (tmp_path / "bad.yaml").write_text("version: 1\n")
    answer = run("simulate", "bad.yaml", *LENGTHS, *SLO, "--rate", "1")
    assert answer.exit_code == 1 and "bad.yaml" in answer.output
