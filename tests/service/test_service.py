"""Requests through a service on a scheduler that it did not start."""

from __future__ import annotations

import pytest
from distributed import as_completed

from daskserve import SamplingParams, Service
from daskserve.errors import ContextOverflow, InvalidParameter, NeverFits

PARAMS = SamplingParams(max_tokens=12)


def test_disaggregated_answers_equal_colocated_ones(service: Service, colocated: Service):
    prompts = [f"prompt {i} " * (1 + i % 7) for i in range(24)]
    answers = service.client.gather(service.map(prompts, PARAMS))
    expected = colocated.client.gather(colocated.map(prompts, PARAMS))
    assert [a.text for a in answers] == [e.text for e in expected]
    assert all(a.num_output_tokens == 12 and a.timeline.num_recomputes == 0 for a in answers)
    assert all(a.timeline.kv_transfer_s > 0 for a in answers)


def test_futures_are_ordinary(service: Service):
    futures = service.map(["a", "b", "c"], PARAMS)
    assert {f.result().text for f in as_completed(futures, loop=service.client.loop)} == {
        f.result().text for f in futures
    }
    assert all(f.key.startswith("decode-") for f in futures)


def test_prefill_future_is_reachable(service: Service):
    future = service.submit("hello", PARAMS)
    prefill = service.prefill_future(future)
    assert prefill.key == future.key.replace("decode-", "prefill-")
    assert prefill.result().first_token_id == future.result().token_ids[0]


def test_equal_prompts_are_not_merged(service: Service):
    params = SamplingParams(max_tokens=12, temperature=1.0)
    first, second = service.client.gather(service.map(["same", "same"], params))
    assert first.token_ids != second.token_ids


def test_one_token_needs_no_decode(service: Service, is_idle, eventually):
    completion = service.submit("hello", SamplingParams(max_tokens=1)).result()
    assert completion.num_output_tokens == 1
    assert completion.finish_reason == "length"
    eventually(lambda: is_idle(service))


def test_blocks_are_free_afterwards(service: Service, is_idle, eventually):
    futures = service.map(["x" * 40] * 30, PARAMS)
    service.client.gather(futures)
    eventually(lambda: is_idle(service))


@pytest.mark.parametrize("prompt", ["", [], [10**9], [True], [1.5], 7, [{}], None])
def test_bad_prompts_are_refused(service: Service, prompt):
    with pytest.raises(InvalidParameter):
        service.submit(prompt, PARAMS)


def test_a_prompt_as_long_as_the_context_is_refused(service: Service):
    with pytest.raises(ContextOverflow, match="8192"):
        service.validate([5] * 8192, PARAMS)


def test_max_tokens_is_lowered_to_the_context(colocated: Service):
    request = colocated.validate([5] * 3000, SamplingParams(max_tokens=100))
    assert request.params.max_tokens == 100


def test_what_never_fits_is_refused_with_the_numbers(service: Service):
    with pytest.raises(NeverFits, match=r"250 KV blocks.*200"):
        service.submit([5] * 3000, SamplingParams(max_tokens=1001))


def test_dispatch_was_always_right(service: Service):
    service.client.gather(service.map([f"p{i}" * i for i in range(1, 40)], PARAMS))
    dispatch = service.status()["dispatch"]
    assert dispatch["choices"] >= 78
    assert dispatch["violations"] == 0, dispatch["notes"]
    assert not dispatch["failed"]


def test_when_dispatch_itself_breaks_dask_schedules(attach, mock):
    with attach(mock(), prefill=1, decode=2) as service:

        def break_it(dask_scheduler) -> None:
            dask_scheduler.plugins["daskserve-dispatch"].state.next_binding = None

        service.client.run_on_scheduler(break_it)
        completions = service.client.gather(service.map(["a", "b", "c"], PARAMS))
        assert [c.num_output_tokens for c in completions] == [12] * 3
        assert service.status()["dispatch"]["failed"]
