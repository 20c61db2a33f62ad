"""``daskserve bench`` from end to end against our own server with the mock model."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading

import pytest
from click.testing import CliRunner

from daskserve.bench.results import Results
from daskserve.bench_command import bench_command
from daskserve.cli import main
from daskserve.planner.traces import read_workload

NOWHERE = "http://nowhere:1"
SHORT = ["--rate", "50", "--requests", "30", "--prompt-tokens", "20-60", "--output-tokens", "5"]


@pytest.fixture
def bench(url, key, monkeypatch):
    """Run the command against the mock server; exit code, standard output and error."""
    monkeypatch.setenv("OPENAI_API_KEY", key)

    def run(*arguments, url=url):
        common = ["--url", url, "--ready-timeout", 0 if url == NOWHERE else 30, "--quiet"]
        given = ["bench", *map(str, (*common, *arguments))]
        result = CliRunner().invoke(main, given)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result.exit_code, result.stdout, result.stderr

    return run


def figure(text, label):
    [value] = re.findall(rf"^{re.escape(label)}:?\s+([\d.]+)$", text, re.MULTILINE)
    return float(value)


def test_a_poisson_run_prints_the_table_and_keeps_every_request(bench, tmp_path):
    path = tmp_path / "run.nc"
    code, out, _ = bench(*SHORT, "--slo-ttft", 5, "--slo-tpot", 5, "--output", path)
    assert code == 0
    assert figure(out, "Successful requests") == 30
    assert figure(out, "Total generated tokens") == 150
    assert figure(out, "SLO attainment (%)") == 100
    # One prefill and one decode instance, as /ready says; both figures are rounded.
    goodput = figure(out, "Request goodput (req/s)")
    assert figure(out, "Request goodput per instance (req/s)") == pytest.approx(goodput / 2, 0.01)
    results = Results.read(path)
    prompt = results.values("prompt_tokens")
    assert figure(out, "Total input tokens") == prompt.sum()
    assert prompt.min() >= 20 and prompt.max() <= 60
    assert len(read_workload(path)) == 30


def test_the_stages_are_those_of_the_server_and_fit_into_what_the_client_saw(bench, tmp_path):
    _, out, _ = bench(*SHORT, "--output", tmp_path / "run.nc")
    assert "CDF of KV Transfer Time" in out
    results = Results.read(tmp_path / "run.nc")
    stages = results.stages()
    before_first = stages["prefill_queue_s"] + stages["prefill_s"]
    assert (stages["kv_transfer_s"] > 0).all()
    assert (before_first <= results.values("ttft_s")).all()
    assert (stages["decode_s"] >= 4 * 0.002).all()


def test_chats_and_prompts_of_a_file(bench, tmp_path):
    (tmp_path / "p.txt").write_text("Tell me something.\nAnd more.\n")
    arguments = ["--endpoint", "chat", "--prompt-file", tmp_path / "p.txt", *SHORT[:4]]
    code, out, _ = bench(*arguments, "--output-tokens", 4)
    assert (code, figure(out, "Total generated tokens")) == (0, 120)
    code, out, _ = bench("--endpoint", "chat", *SHORT)
    assert (code, figure(out, "Successful requests")) == (0, 30)


def test_a_trace_is_sent_as_it_is(bench, tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,2\n0.2,8,3\n")
    _, out, _ = bench("--workload", tmp_path / "t.csv", "--output", tmp_path / "run.nc")
    results = Results.read(tmp_path / "run.nc")
    assert results.values("prompt_tokens").tolist() == [9, 8]
    assert results.values("output_tokens").tolist() == [2, 3]
    assert results.values("arrival_s")[1] - results.values("arrival_s")[0] == pytest.approx(0.2)


def test_an_earlier_run_is_judged_again_without_a_server(bench, tmp_path):
    bench(*SHORT, "--output", tmp_path / "run.nc")
    limits = ["--slo-ttft", 1e-6, "--slo-tpot", 1, "--slo-scales", "1,10000000"]
    code, out, _ = bench("--recorded", tmp_path / "run.nc", *limits, url=NOWHERE)
    assert (code, figure(out, "SLO attainment (%)")) == (0, 0)
    assert out.splitlines()[-1].split()[3:] == ["100.0%"] * 3


@pytest.mark.slow
def test_the_goodput_of_what_runs_is_found_and_bounded_by_a_cap(bench):
    arguments = ["--find-goodput", "--rate", 40, "--max-rate", 60, "--duration", 1]
    lengths = ["--prompt-tokens", 10, "--output-tokens", 2]
    code, out, _ = bench(*arguments, *lengths, "--slo-ttft", 5, "--slo-tpot", 5)
    assert code == 0
    assert "goodput: 60 requests/s (30 per instance)" in out
    assert "it may do better" in out
    arguments[2] = 15  # half of that would take too long to show anything
    code, out, _ = bench(*arguments, *lengths, "--slo-ttft", 0.0005, "--slo-tpot", 5)
    assert code == 3
    assert "none of the rates tried meets the SLO" in out
    assert "would meet TTFT" in out


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--model", "gpt-5"], "model 'gpt-5' is not served; the server has mock"),
        (["--ready-timeout", 0, "--url", f"http://127.0.0.1:{closed_port()}"], "unreachable"),
        (["--url", "127.0.0.1"], "must begin with http"),
        (["--url", "http://[::1"], "--url"),
        (["--api-key-file", "/none"], "cannot read a key"),
        (["--prompt-tokens", "9-1"], "the lower number first"),
        (["--output-tokens", "0"], "at least 1"),
        (["--rate", "0"], "rate=0.0 must be"),
        (["--rate", "nan"], "rate=nan must be"),
        (["--arrivals", "workload"], "needs --workload"),
        (["--workload", "none.csv"], "cannot read none.csv"),
        (["--slo-ttft", "1"], "go together"),
        (["--find-goodput"], "needs --slo-ttft"),
        (["--find-goodput", "--slo-ttft", "1", "--slo-tpot", "1", "--requests", "9"], "--duration"),
        (["--find-goodput", "--slo-ttft", "1", "--slo-tpot", "1", "--tolerance", "0"], "tolerance"),
        (["--output", "run.csv"], "must end in .nc"),
        (["--output", "/none/run.nc"], "there is no such folder"),
        (["--max-rate", "9"], "--max-rate goes with --find-goodput"),
        (["--burstiness", "2", "--arrivals", "constant"], "not of constant"),
        (["--burstiness", "-2"], "--burstiness -2 must be"),
        (["--slo-scales", "1,x", "--slo-ttft", "1", "--slo-tpot", "1"], "--slo-scales '1,x'"),
        (["--token-ids", "9999-99999"], "does not answer a first request: 400"),
        (["--duration", "5", "--requests", "3"], "not both"),
        (["--recorded", "none.nc"], "cannot read none.nc"),
    ],
)
def test_what_cannot_be_run_is_one_line(bench, arguments, part):
    code, out, error = bench("--rate", "10", *arguments)
    assert code == 1
    assert error.startswith("error: ") and error.count("\n") == 1
    assert part in error
    assert "Successful requests" not in out


def test_a_wrong_key_is_named(bench, tmp_path, key):
    (tmp_path / "key").write_text("# ours\nanother-key-of-sixteen\n")
    code, _, error = bench("--api-key-file", tmp_path / "key", *SHORT)
    assert (code, "401 invalid_api_key" in error) == (1, True)
    (tmp_path / "key").write_text(f"{key}\n")
    assert bench("--api-key-file", tmp_path / "key", *SHORT)[0] == 0


def test_requests_that_fail_are_counted_and_change_the_exit_code(bench, tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,2\n0.1,999999,3\n")
    code, out, _ = bench("--workload", tmp_path / "t.csv", "--slo-ttft", 9, "--slo-tpot", 9)
    assert code == 3
    assert figure(out, "Failed requests") == 1
    assert figure(out, "SLO attainment (%)") == 50
    assert "failed: 1 x 400 context_length_exceeded" in out


def test_ctrl_c_prints_what_was_measured(url, key, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    arguments = ["--url", url, "--ready-timeout", "30", "--rate", "20", "--requests", "1000"]
    lengths = ["--prompt-tokens", "9", "--output-tokens", "3"]
    interrupt = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    try:
        with pytest.raises(SystemExit) as caught:
            bench_command.main([*arguments, *lengths], standalone_mode=False)
    finally:
        interrupt.cancel()
    assert caught.value.code == 130
    assert 1 < figure(capsys.readouterr().out, "Successful requests") < 100
