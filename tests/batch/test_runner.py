"""Whole jobs on a real service with the mock model: every row once, whatever its kind."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter

import dask.bag
import dask.config
import dask.dataframe
import pandas as pd
import pyarrow.parquet
import pytest

from daskserve import SLO, SamplingParams, run_batch
from daskserve.batch import BatchJob
from daskserve.errors import BatchError

PARAMS = SamplingParams(max_tokens=4)


def write_lines(path, records):
    lines = (r if isinstance(r, str) else json.dumps(r) for r in records)
    path.write_text("".join(line + "\n" for line in lines))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(path):
    return {line["custom_id"]: line["text"] for line in read_lines(path)}


def test_bad_rows_become_error_lines_and_the_rest_is_answered(service, tmp_path):
    records = [{"custom_id": f"r{i}", "prompt": f"prompt {i}"} for i in range(1, 21)]
    records[6]["prompt"] = "too long " * 2000
    records[11] = '{"custom_id": "r12", "prompt'
    source = write_lines(tmp_path / "in.jsonl", records)
    summary = run_batch(service, source, tmp_path / "out.jsonl", params=PARAMS)
    assert (summary.num_succeeded, summary.num_failed, summary.exit_code) == (18, 2, 3)
    lines = {line["custom_id"]: line for line in read_lines(tmp_path / "out.jsonl")}
    assert len(lines) == 20
    failed = {name: line["error"]["code"] for name, line in lines.items() if line["error"]}
    assert failed == {"r7": "context_length_exceeded", "line-12": "invalid_row"}
    usage = lines["r1"]["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert len(lines["r1"]["text"]) == 4


def test_every_kind_of_bad_row_fails_alone(service, tmp_path):
    bad = [
        {"prompt": ""},
        {"prompt": "x", "max_tokens": 10**30},
        {"prompt": "x", "max_tokens": -5},
        '{"prompt": "x", "temperature": NaN}',
        '{"prompt": "\\ud800"}',
        {"prompt": "x", "model": "gpt-9"},
        {"prompt": [10**12]},
        {"messages": []},
        "[]",
        {"prompt": "x", "y" * 10**5: 1},
    ]
    source = write_lines(tmp_path / "in.jsonl", [*bad, {"prompt": "good"}])
    with source.open("ab") as file:
        file.write(b'{"prompt": "\xff"}\n')
    summary = run_batch(service, source, tmp_path / "out.jsonl", params=PARAMS)
    assert (summary.num_succeeded, summary.num_failed) == (1, 11)
    errors = [line["error"] for line in read_lines(tmp_path / "out.jsonl") if line["error"]]
    assert all(0 < len(error["message"]) < 600 for error in errors) and len(errors) == 11


def test_a_row_that_breaks_its_reader_fails_alone(service, tmp_path, monkeypatch):
    honest = service.validate

    def validate(prompt, params):
        if prompt == "b":
            raise ZeroDivisionError("a bug of the tokenizer")
        return honest(prompt, params)

    monkeypatch.setattr(service, "validate", validate)
    summary = run_batch(service, ["a", "b", "c"], tmp_path / "out.jsonl", params=PARAMS)
    assert (summary.num_succeeded, summary.num_failed) == (2, 1)
    assert summary.failures == ("row-1: ZeroDivisionError: a bug of the tokenizer",)


def test_openai_rows_are_answered_in_openai_form(service, tmp_path):
    def line(name, url, body):
        return {"custom_id": name, "method": "POST", "url": url, "body": body}

    hello = [{"role": "user", "content": "hello"}]
    chat, completion = "/v1/chat/completions", "/v1/completions"
    records = [
        line("chat", chat, {"model": "mock", "messages": hello, "max_completion_tokens": 3}),
        line("text", completion, {"prompt": "hello", "max_tokens": 2}),
        line("bad", completion, {"prompt": "hello", "n": 2}),
        "not json",
    ]
    source = write_lines(tmp_path / "in.jsonl", records)
    run_batch(service, source, tmp_path / "out.jsonl", ordered=True)
    first, second, third, fourth = read_lines(tmp_path / "out.jsonl")
    body = first["response"]["body"]
    assert body["object"] == "chat.completion" and body["usage"]["completion_tokens"] == 3
    assert body["choices"][0]["finish_reason"] == "length"
    assert second["response"]["body"]["object"] == "text_completion"
    assert third["error"]["message"].startswith("n=2 is not supported")
    assert fourth["custom_id"] == "line-4" and fourth["response"]["status_code"] == 400


def test_all_sources_and_outputs_give_the_same_answers(service, tmp_path):
    prompts = [f"prompt {i}" for i in range(30)]
    records = [{"custom_id": f"row-{i}", "prompt": p} for i, p in enumerate(prompts)]
    write_lines(tmp_path / "in.jsonl", records)
    frame = pd.DataFrame(records)
    frame.to_parquet(tmp_path / "in.parquet")
    bag = dask.bag.from_sequence(prompts, npartitions=3)
    table = dask.dataframe.from_pandas(frame, npartitions=4)
    sources = [tmp_path / "in.jsonl", tmp_path / "in.parquet", bag, table, prompts]
    found = []
    for number, source in enumerate(sources):
        output = tmp_path / f"out-{number}.jsonl"
        run_batch(service, source, output, params=PARAMS)
        found.append(answers(output))
    run_batch(service, prompts, tmp_path / "out.parquet", params=PARAMS)
    written = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["custom_id"] for row in written] == [f"row-{i}" for i in range(30)]
    found.append({row["custom_id"]: row["text"] for row in written})
    assert all(answer == found[0] and len(answer) == 30 for answer in found)


def test_ordered_output_is_in_the_order_of_the_input(service, tmp_path):
    records = [{"prompt": f"p{i}", "max_tokens": 1 + i % 7} for i in range(60)]
    source = write_lines(tmp_path / "in.jsonl", records)
    run_batch(service, source, tmp_path / "out.jsonl", ordered=True)
    ids = [line["custom_id"] for line in read_lines(tmp_path / "out.jsonl")]
    assert ids == [f"line-{i + 1}" for i in range(60)]


def test_complete_job_is_not_run_again_unless_restarted(service, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": ""}])
    output = tmp_path / "out.jsonl"
    first = run_batch(service, source, output, params=PARAMS)
    written_at = output.stat().st_mtime_ns
    assert run_batch(service, source, output, params=PARAMS) == first
    assert output.stat().st_mtime_ns == written_at
    run_batch(service, source, output, params=PARAMS, restart=True)
    assert output.stat().st_mtime_ns != written_at
    output.unlink()
    assert run_batch(service, source, output, params=PARAMS).num_earlier == 0
    assert len(read_lines(output)) == 2


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff", b"{}", b'{"output_bytes": %d}'])
def test_a_damaged_summary_is_made_again(service, tmp_path, content):
    output = tmp_path / "out.jsonl"
    first = run_batch(service, ["a", "b"], output, params=PARAMS)
    size = output.stat().st_size
    (tmp_path / "out.jsonl.job" / "summary.json").write_bytes(content.replace(b"%d", b"%d" % size))
    again = run_batch(service, ["a", "b"], output, params=PARAMS)
    assert (again.num_rows, again.num_earlier) == (2, 2) and again.ttft_s == first.ttft_s


@pytest.mark.parametrize("share", [0.0, 0.3, 0.77, 0.999])
def test_job_with_cut_files_is_brought_to_its_end(service, tmp_path, share):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(20)])
    output = tmp_path / "out.jsonl"
    run_batch(service, source, output, params=PARAMS)
    expected = answers(output)
    content = output.read_bytes()
    content = content[: int(share * len(content))]
    output.write_bytes(content)
    summary = run_batch(service, source, output, params=PARAMS)
    assert summary.num_rows == 20 and summary.num_earlier == content.count(b"\n")
    assert len(read_lines(output)) == 20 and answers(output) == expected


def test_other_parameters_or_input_are_another_job(service, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    output = tmp_path / "out.jsonl"
    run_batch(service, source, output, params=PARAMS)
    with pytest.raises(BatchError, match="max_tokens: 4 -> 5"):
        run_batch(service, source, output, params=SamplingParams(max_tokens=5))
    write_lines(source, [{"prompt": "b"}])
    with pytest.raises(BatchError, match="input_sha256"):
        run_batch(service, source, output, params=PARAMS)


def test_empty_input_is_an_empty_output(service, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [])
    summary = run_batch(service, source, tmp_path / "out.jsonl")
    assert (summary.num_rows, summary.exit_code) == (0, 0)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_rows_in_flight_stay_within_the_window(service, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(60)])
    most, stop = 0, threading.Event()

    def watch():
        nonlocal most
        while not stop.is_set():
            held = [key for key in list(service.client.futures) if key.startswith("decode-")]
            most = max(most, len(held))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    run_batch(service, source, tmp_path / "out.jsonl", params=PARAMS, max_in_flight=5)
    stop.set()
    watcher.join()
    # A result that is being written is still held beside the full window.
    assert 3 <= most <= 10


def test_many_rows_with_slo(service, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(300)])
    slo = SLO(ttft_s=60, tpot_s=60)
    summary = run_batch(service, source, tmp_path / "out.jsonl", params=PARAMS, slo=slo)
    ids = Counter(line["custom_id"] for line in read_lines(tmp_path / "out.jsonl"))
    assert ids == Counter(f"line-{i + 1}" for i in range(300))
    assert summary.attainment == 1.0 and summary.goodput_rows_per_s > 0
    assert summary.stages_s["decode_s"] > 0 and summary.ttft_s["p50"] > 0


def test_window_size_is_checked(service, tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    with pytest.raises(Exception, match="max_in_flight=0 must be at least 1"):
        run_batch(service, source, tmp_path / "out.jsonl", max_in_flight=0)
    with dask.config.set({"daskserve.batch.max-in-flight": 2}):
        run_batch(service, source, tmp_path / "out.jsonl", params=PARAMS, restart=True)
    assert "2 rows in flight cannot fill 64 decode slots" in capsys.readouterr().err


def test_a_job_can_be_ended_from_outside_and_given_up(service, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(40)])
    output = tmp_path / "out.jsonl"

    def end_after_five(tally):
        if tally.num_succeeded >= 5:
            raise InterruptedError

    with BatchJob(source, output, service.config, params=PARAMS, model_name="other") as job:
        with pytest.raises(InterruptedError):
            job.run(service, 2, show_progress=False, on_tick=end_after_five)
        summary = job.abandon("batch_expired", "too late")
    lines = read_lines(output)
    assert {line["custom_id"] for line in lines} == {f"line-{i + 1}" for i in range(40)}
    codes = [line["error"] and line["error"]["code"] for line in lines]
    assert (codes.count(None), codes.count("batch_expired")) == (
        summary.num_succeeded,
        summary.num_failed,
    )
    assert 5 <= summary.num_succeeded < 40
    assert summary.failures[0].endswith("too late")
