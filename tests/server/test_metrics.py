from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from daskserve import SLO
from daskserve.observe import Snapshot

TEXT = {"model": "mock", "prompt": "hi", "max_tokens": 4}


@pytest.fixture(scope="module")
def judged(server, alongside):
    """A server with an SLO that a warm mock engine meets."""
    with alongside(server, slo=SLO(ttft_s=30, tpot_s=30)) as other:
        yield other


def scraped(server):
    """Samples by name and sorted labels."""
    with server.http() as http:
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name.removeprefix("daskserve:"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_what_answers_cost_is_counted(judged):
    before = scraped(judged)
    client = judged.client()
    prompt_tokens = client.completions.create(**TEXT).usage.prompt_tokens
    list(client.completions.create(**TEXT, stream=True, n=2))
    with judged.http() as http:
        http.post("/v1/completions", json={**TEXT, "n": 0})
    after = scraped(judged)

    def grown(name, **labels):
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0)

    assert grown("request_success_total", finished_reason="length") == 3
    assert grown("generation_tokens_total") == 12
    assert grown("prompt_tokens_total") == 3 * prompt_tokens
    assert grown("request_failure_total", code="invalid_parameter") == 1
    for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency"):
        assert grown(f"{name}_seconds_count") == 3
    for stage in ("prefill_queue", "prefill", "kv_transfer", "decode_queue", "decode"):
        assert grown("request_stage_seconds_count", stage=stage) == 3
        assert grown("request_stage_seconds_sum", stage=stage) >= 0
    assert grown("e2e_request_latency_seconds_sum") >= grown("time_to_first_token_seconds_sum") > 0
    assert grown("slo_requests_total") == grown("slo_attained_total") == 3
    assert after["slo_attainment_ratio", ()] == 1.0
    assert after["goodput_requests_per_second", ()] >= 3 / 60


def test_stages_add_up_to_the_whole(judged):
    before = scraped(judged)
    judged.client().completions.create(**TEXT)
    after = scraped(judged)
    grown = {key: value - before.get(key, 0) for key, value in after.items()}
    stages_s = sum(v for (name, _), v in grown.items() if name == "request_stage_seconds_sum")
    whole_s = grown["e2e_request_latency_seconds_sum", ()]
    assert 0 < stages_s <= whole_s + 0.01


def test_what_instances_do_is_shown(judged, eventually):
    stream = judged.client().completions.create(
        **{**TEXT, "max_tokens": 3000, "prompt": "x" * 600}, stream=True
    )
    next(iter(stream))

    def decode():
        samples = scraped(judged)
        running = samples["num_requests_running", (("role", "DECODE"),)]
        usage = [
            value
            for (name, labels), value in samples.items()
            if name == "kv_cache_usage_perc" and ("role", "DECODE") in labels
        ]
        return (running, samples["num_requests_in_flight", ()]) == (1, 1) and 0 < usage[0] < 1

    eventually(decode, 5)
    stream.close()
    eventually(judged.is_idle, 3)
    samples = scraped(judged)
    for role in ("PREFILL", "DECODE"):
        labels = (("role", role),)
        assert samples["num_instances_ready", labels] == 1
        assert samples["num_requests_waiting", labels] == 0
        assert samples["num_requests_running", labels] == 0


def test_without_an_slo_nothing_is_judged(server):
    names = {name for name, _ in scraped(server)}
    assert "num_requests_in_flight" in names and "slo_attainment_ratio" not in names


def test_no_answers_have_no_share(server, alongside):
    with alongside(server, slo=SLO(ttft_s=1, tpot_s=1)) as other:
        samples = scraped(other)
    assert math.isnan(samples["slo_attainment_ratio", ()])
    assert samples["goodput_requests_per_second", ()] == 0


def test_pulled_kv_is_counted_by_rank_and_place(judged):
    before = scraped(judged)
    judged.client().completions.create(**TEXT)
    after = scraped(judged)

    def total(samples, name, same_host):
        wanted, place = f"kv_{name}_total", ("same_host", same_host)
        return sum(v for (n, labels), v in samples.items() if n == wanted and place in labels)

    assert total(after, "pulls", "true") == total(before, "pulls", "true") + 1
    assert total(after, "pulled_bytes", "true") > total(before, "pulled_bytes", "true")
    assert total(after, "pulled_bytes", "false") == 0


def test_the_snapshot_for_dashboards(judged, eventually):
    client = judged.client()
    with judged.http() as http:
        cursor = http.get("/snapshot").json()["cursor"]
        client.completions.create(**TEXT | {"max_tokens": 7})

        def since():
            return Snapshot.from_record(http.get("/snapshot", params={"cursor": cursor}).json())

        # Other requests of this module may be recorded only now.
        eventually(lambda: 7 in [one.output_tokens for one in since().finished], timeout_s=5.0)
        snapshot = since()
        assert [one.output_tokens for one in snapshot.finished].count(7) == 1
        assert snapshot.slo == SLO(30, 30) and snapshot.model == "mock"
        assert http.get("/snapshot", params={"cursor": "-1"}).status_code == 400
