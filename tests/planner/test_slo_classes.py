"""Several SLO classes at once: a rate holds when every class meets its own target."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from daskserve.cli import main
from daskserve.core.slo import SLO
from daskserve.errors import ConfigError, InvalidParameter, WorkloadError
from daskserve.planner.applications import APPLICATIONS, mixed
from daskserve.planner.goodput import goodput, probe_rate
from daskserve.planner.hardware import Cluster
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.planning import plan
from daskserve.planner.simulator import Deployment, simulate, simulate_stream
from daskserve.planner.slo_classes import SLOClasses
from daskserve.planner.step_times import StepTimes
from daskserve.planner.sweep import sweep
from daskserve.planner.traces import read_workload
from daskserve.planner.workload import Workload

TIMES = StepTimes(
    prefill_knots_tokens=[0, 512],
    prefill_knots_s=[0.05, 0.05],
    prefill_quadratic_s=0.0,
    decode_base_s=np.r_[0, 0.010 + 1e-4 * np.arange(1, 65)],
    decode_per_context_s=np.zeros(65),
    prefill_budget_tokens=1,
    kv_capacity_tokens=64 * 640,
)
BOTH = Deployment.disaggregated(TIMES, 2, TIMES, 1)
TIGHT, LOOSE = SLO(0.2, 0.0145), SLO(2.0, 0.2)


def trace(share=0.5, names=("chat", "bulk"), seed=5):
    """1,000 requests alike but for their class; ``share`` are of the first."""
    is_first = np.random.default_rng(seed).random(1000) < share
    plain = Workload.uniform(1000, 10, 512, 64)
    return Workload.from_arrays(*plain.arrays(), np.where(is_first, *names))


def test_two_identical_classes_are_one():
    """The same requests are drawn, and the same share of them is met."""
    rate = goodput(trace(), BOTH, TIGHT, seeds=[0]).rate
    twice = {"chat": TIGHT, "bulk": TIGHT}
    one, two = (probe_rate(trace(), BOTH, slo, rate) for slo in (TIGHT, twice))
    assert replace(two, classes=()) == replace(one, classes=())
    # Each class is held to the target by itself: the luck of one is not that of the other.
    assert goodput(trace(), BOTH, twice, seeds=[0]).rate == pytest.approx(rate, rel=0.03)


@pytest.mark.parametrize(
    ("share", "slo"), [(0.9, TIGHT), (0.3, SLO(0.12, 0.1)), (0.5, SLO(1.0, 0.0125))]
)
def test_a_class_with_loose_limits_never_lowers_goodput(share, slo):
    """It is the same queue with fewer requests that can fail, up to the noise of the seeds."""
    alone = goodput(trace(share), BOTH, slo)
    beside = goodput(trace(share), BOTH, {"chat": slo, "bulk": LOOSE})
    assert beside.high >= alone.low and beside.rate >= 0.97 * alone.rate


def test_the_tight_class_binds_and_is_named():
    """Nine in ten are of another class and in time: the tenth has a target of its own."""
    slo = {"bulk": LOOSE, "chat": SLO(0.12, 0.1)}
    found = goodput(trace(0.1), BOTH, slo)
    assert (found.limited_by, found.limiting_class) == ("ttft", "chat")
    assert "requests of chat wait too long" in found.reason
    above = next(p for p in found.probes if p.verdict == "missed")
    assert above.binding.name == "chat" and above.binding.attainment < 0.9 < above.attainment
    assert found.rate < 0.8 * goodput(trace(0.1), BOTH, LOOSE).rate
    assert found.rate == pytest.approx(goodput(trace(0.1), BOTH, SLO(0.12, 0.1)).rate, rel=0.05)


def test_each_class_has_a_target_of_its_own():
    strict = {"chat": replace(TIGHT, attainment=0.99), "bulk": replace(TIGHT, attainment=0.5)}
    lax = {"chat": replace(TIGHT, attainment=0.5), "bulk": replace(TIGHT, attainment=0.5)}
    found = goodput(trace(), BOTH, strict, seeds=[0])
    assert found.limiting_class == "chat"
    assert found.rate < goodput(trace(), BOTH, lax, seeds=[0]).rate


def test_even_a_rare_class_is_seen_often_enough():
    probe = probe_rate(trace(0.02), BOTH, {"chat": TIGHT, "bulk": LOOSE}, 15.0)
    assert min(share.num_requests for share in probe.classes) > 500 and probe.is_long_enough


def test_a_class_that_no_request_can_meet_alone():
    found = goodput(trace(), BOTH, {"chat": SLO(0.01, 1.0), "bulk": LOOSE})
    assert found.status == "infeasible" and "even a request of chat alone" in found.reason
    assert found.best.share.name == "chat" and found.best.ttft_s == pytest.approx(0.05)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.01, 0.99), st.integers(0, 99), st.floats(0.06, 0.5), st.floats(0.011, 0.03))
def test_classes_conserve_requests(share, seed, ttft_s, tpot_s):
    """Every request is of one class, whichever way it is counted."""
    requests = trace(share, seed=seed).scaled_to(30.0)
    slo = {"bulk": LOOSE, "chat": SLO(ttft_s, tpot_s)}
    result = simulate(requests, BOTH)
    table, streamed = result.by_class(slo), simulate_stream(requests, BOTH, slo, window_s=10)
    assert table["attainment"].dims == ("slo_class",) and int(table["num_requests"].sum()) == 1000
    met = float((table["attainment"] * table["num_requests"]).sum())
    assert met / 1000 == pytest.approx(result.attainment(slo))
    assert streamed.attainment == pytest.approx(result.attainment(slo))
    columns = ["num_requests", "attainment", "target"]
    assert streamed.by_class().equals(table[columns])
    mine = result.timelines.where(result.timelines["slo_class"] == "chat", drop=True)
    is_met = (mine["ttft_s"] <= ttft_s) & (mine["tpot_s"] <= tpot_s)
    assert float(is_met.mean()) == pytest.approx(float(table["attainment"].sel(slo_class="chat")))
    windows = streamed.windows()["class_attainment"]
    assert windows.dims == ("window", "slo_class")


def test_a_sweep_has_a_dimension_of_classes():
    slo = {"chat": SLO(0.12, 0.0125), "bulk": LOOSE}
    shares = sweep(trace(), BOTH, slo, [5.0, 30.0], slo_scales=[1.0, 2.0], max_requests=2000)
    by_class = shares["class_attainment"]
    assert by_class.dims == ("slo_class", "rate", "slo_scale", "seed")
    assert (by_class.sel(slo_class="bulk") >= by_class.sel(slo_class="chat")).all()
    assert by_class.sel(slo_class="chat", rate=30.0, slo_scale=1.0).max() < 0.5
    assert (by_class.min("slo_class") <= shares["attainment"]).all()


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ({"chat": TIGHT}, "slo_class='bulk' of request .* has no SLO: there are chat"),
        ({"chat": TIGHT, "bulk": LOOSE, "idle": LOOSE}, "no data: SLO class 'idle' has no req"),
    ],
)
def test_classes_and_requests_must_match(slo, message):
    with pytest.raises(WorkloadError, match=message):
        goodput(trace(), BOTH, slo)
    with pytest.raises(WorkloadError, match=message):
        sweep(trace(), BOTH, slo, [1.0])
    with pytest.raises(WorkloadError, match=message):
        PlanRequest(ModelSpec.load("llama-3.1-8b"), Cluster.of("H100"), trace(), slo, rate=1.0)


def test_classes_that_make_no_sense():
    with pytest.raises(WorkloadError, match="no column slo_class for chat"):
        goodput(Workload.uniform(100, 1, 5, 5), BOTH, {"chat": TIGHT})
    with pytest.raises(InvalidParameter, match="at least one class"):
        SLOClasses.of({})
    with pytest.raises(InvalidParameter, match="all with names"):
        SLOClasses.of({" ": TIGHT})
    rare = Workload.from_arrays(np.arange(3000.0), [5] * 3000, [5] * 3000,
                                ["chat"] + ["bulk"] * 2999)  # fmt: skip
    with pytest.raises(WorkloadError, match=r"'chat' has 1 of 3000 requests: at least 0\.1%"):
        goodput(rare, BOTH, {"chat": TIGHT, "bulk": LOOSE})
    with pytest.raises(WorkloadError, match="one name for each of 2 requests"):
        Workload.from_arrays([0, 1], [5, 5], [5, 5], ["chat"])
    with pytest.raises(WorkloadError, match="slo_class of request 1 must have a name"):
        Workload.from_arrays([0, 1], [5, 5], [5, 5], ["chat", ""])
    with pytest.raises(WorkloadError, match="pieces of a trace have no slo_class"):
        simulate_stream(iter(()), BOTH, {"chat": TIGHT})


def test_traces_name_classes(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,slo_class\n0,9,5,chat\n1,7,5, bulk\n")
    assert read_workload(path).dataset["slo_class"].values.tolist() == ["chat", "bulk"]
    path.write_text("arrival_s,prompt_tokens,output_tokens,slo_class\n0,9,5,chat\n1,7,5,\n")
    with pytest.raises(WorkloadError, match="line 3: slo_class='' must be a name"):
        read_workload(path)
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 5, "slo_class": 3}\n')
    with pytest.raises(WorkloadError, match="line 1: slo_class=3 must be a name"):
        read_workload(lines)


def test_a_plan_says_what_each_class_attains_and_which_binds():
    lengths = Workload.from_arrays([0.0] * 4, [200, 500, 900, 9000], [40, 100, 20, 60],
                                   ["chat", "chat", "chat", "report"])  # fmt: skip
    slo = {"report": SLO(5.0, 0.1), "chat": SLO(0.4, 0.05, 0.95)}
    request = PlanRequest(ModelSpec.load("llama-3.1-8b"), Cluster.of("H100", 4), lengths, slo,
                          rate=12.0, seeds=(0,))  # fmt: skip
    found = plan(request)
    attained = found.ranking["attainment"]
    assert attained.dims == ("option", "slo_class")
    best = attained.sel(option=found.chosen.name)
    assert (best >= found.ranking["target"]).all()
    [line] = [line for line in found.explanation if line.startswith("SLO class")]
    assert line.startswith("SLO class chat binds, by ")
    impossible = plan(request.with_slo({**slo, "chat": SLO(0.001, 0.05)}))
    assert impossible.status == "infeasible"
    assert impossible.nearest_slo["report"] == slo["report"]
    assert re.search(r"can be met is TTFT \S+ s and TPOT 0.05 s of chat$", impossible.reason)


def test_applications_in_shares():
    both = mixed({"chatbot-opt-66b": 0.7, "summarization-opt-66b": 0.3})
    counts = dict(zip(*np.unique(both.dataset["slo_class"], return_counts=True), strict=True))
    assert counts == {"chatbot-opt-66b": 14_000, "summarization-opt-66b": 6_000}
    with pytest.raises(ConfigError, match="must have the same model: .* has opt-13b"):
        mixed({"chatbot-opt-66b": 0.7, "chatbot-opt-13b": 0.3})
    with pytest.raises(InvalidParameter, match="must be 1 together"):
        mixed({"chatbot-opt-66b": 0.7, "summarization-opt-66b": 0.2})
    for bad in (0.0, -1.0, float("nan"), 2.0):
        with pytest.raises(InvalidParameter, match="code-opt-66b=.* must be a share"):
            mixed({"chatbot-opt-66b": 0.7, "code-opt-66b": bad})
    assert {one.model for one in APPLICATIONS.values()} >= {"opt-66b"}


PLAN = ["plan", "--model", "llama-3.1-8b", "--gpus", "H100:4", "--seeds", "1",
        "--workload", "t.csv"]  # fmt: skip
CLASSES = ["--slo-class", "chat:250ms:0.05:0.95", "--slo-class", "bulk:5:0.1"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{i * 0.1:.1f},300,20,{('chat', 'bulk')[i % 3 == 0]}\n" for i in range(600))
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens,slo_class\n" + rows)
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words])


def test_classes_on_the_command_line(run, tmp_path):
    planned = run(*PLAN, *CLASSES)
    assert planned.exit_code == 0, planned.output
    assert "for 95% of chat; TTFT 5 s and TPOT 0.1 s for 90% of bulk" in planned.output
    assert re.search(r"colocated: \S+% of chat \(target 95%\); \S+% of bulk", planned.output)
    replayed = run("simulate", "placement.yaml", "--workload", "t.csv", *CLASSES, "--timeline",
                   "out.csv")  # fmt: skip
    assert replayed.exit_code == 0, replayed.output
    assert "chat, 400 requests: 100.00% met TTFT 0.25 s" in replayed.output
    assert "bulk, 200 requests: 100.00% met TTFT 5 s" in replayed.output
    header, first, *_ = (tmp_path / "out.csv").read_text().splitlines()
    assert header.endswith("slo_class") and first.endswith("bulk")
    tight = ["--slo-class", "chat:1ms:1", "--slo-class", "bulk:5:0.1"]
    missed = run("simulate", "placement.yaml", "--workload", "t.csv", *tight)
    assert missed.exit_code == 3, missed.output


def test_applications_on_the_command_line(run):
    shares = ["--application", "chatbot-opt-66b=0.7", "--application", "summarization-opt-66b=0.3"]
    answer = run("plan", "--gpus", "A100:4", *shares, "--rate", "1", "--seeds", "1")
    assert answer.exit_code == 0, answer.output
    assert "TTFT 15 s and TPOT 0.15 s for 90% of summarization-opt-66b" in answer.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slo-class", "chat:1:1"], "slo_class='bulk' of request 0 has no SLO"),
        ([*CLASSES, "--slo-class", "idle:1:1"], "no data: SLO class 'idle' has no requests"),
        ([*CLASSES, "--slo-class", "chat:1:1"], "the class chat is given twice"),
        (["--slo-class", "chat:1"], "must look like chat:0.25:50ms"),
        (["--slo-class", ":1:1"], "must look like chat:0.25:50ms"),
        (["--slo-class", "chat:soon:1"], "--slo-class chat:soon:1: TTFT: 'soon' is not a duration"),
        (["--slo-class", "chat:0:1"], "chat:0:1: ttft_s=0.0 must be a finite number .* above 0"),
        (["--slo-class", "chat:1:1:90"], "attainment=90.0 must be above 0 and at most 1"),
        (["--slo-class", "chat:1:1:most"], "'most' is not a number"),
        ([*CLASSES, "--ttft", "1"], "has limits of its own: leave --ttft out"),
        ([*CLASSES, "--attainment", "0.9"], "leave --attainment out"),
    ],
)  # fmt: skip
def test_bad_classes_are_one_line(run, words, message):
    answer = run(*PLAN, *words)
    assert answer.exit_code == 1 and not isinstance(answer.exception, Exception)
    assert re.search(message, answer.output), answer.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["code-opt-66b=0.5"], "write =SHARE for each of several"),
        (["code-opt-66b=0.5", "chatbot-opt-66b"], "write =SHARE for each of several"),
        (["code-opt-66b=0.5", "code-opt-66b=0.5"], "code-opt-66b is given twice"),
        (["code-opt-66b=half", "chatbot-opt-66b=0.5"], "'half' is not a number"),
        (["code-opt-66b=0.5", "chatbot-opt-13b=0.5"], "must have the same model"),
    ],
)
def test_bad_applications_are_one_line(run, words, message):
    options = [word for name in words for word in ("--application", name)]
    answer = run("plan", "--gpus", "A100:4", "--rate", "1", *options)
    assert answer.exit_code == 1 and not isinstance(answer.exception, Exception)
    assert re.search(message, answer.output), answer.output


def test_wrong_usage_is_not_infeasible(run):
    assert run("plan", "--rate", "many").exit_code == 2
