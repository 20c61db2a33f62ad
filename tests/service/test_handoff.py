"""The hand-off from prefill to decode: no wrong text and no lost block, whatever happens."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace

import dask
import pytest
from distributed import wait

from daskserve import EngineConfig, Role, SamplingParams, Service
from daskserve.errors import InvalidParameter, NeverFits
from daskserve.service.kv_pull import OPERATION

PARAMS = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def pair(attach, mock) -> Iterator[Service]:
    """One prefill and one decode instance, small pools, chances to interfere."""
    with attach(mock(num_kv_blocks=24, kv_lease_s=5.0), prefill=1, decode=1) as service:
        yield service


def on_prefill(service: Service, function, **kwargs):
    """Run a function on the prefill worker."""
    address = next(i.address for i in service.info() if i.role is Role.PREFILL)
    return service.client.run(function, workers=[address], **kwargs)[address]


def expected(colocated: Service, prompts: list) -> list[str]:
    return [c.text for c in colocated.client.gather(colocated.map(prompts, PARAMS))]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 300])
def test_prompt_lengths_around_page_bounds(pair: Service, colocated: Service, length: int):
    prompt = [97 + i % 26 for i in range(length)]
    assert pair.submit(prompt, PARAMS).result().text == expected(colocated, [prompt])[0]


def test_a_pool_of_one_and_a_half_requests_serves_twenty(attach, mock, is_idle, eventually):
    with attach(mock(num_kv_blocks=9), prefill=1, decode=1) as service:
        futures = service.map([[5] * 60] * 20, SamplingParams(max_tokens=30))
        completions = service.client.gather(futures)
        assert len({c.text for c in completions}) == 1
        assert all(c.timeline.num_recomputes == 0 for c in completions)
        eventually(lambda: is_idle(service))


def test_requests_are_served_in_order_of_submission(attach, mock):
    with attach(mock(num_kv_blocks=6), prefill=1, decode=1) as service:
        futures = service.map([[5] * 60] * 8, SamplingParams(max_tokens=10))
        finished: list[int] = []
        while len(finished) < len(futures):
            finished += [i for i, f in enumerate(futures) if f.done() and i not in finished]
            time.sleep(0.002)  # the instances are threads of this process
        assert finished == sorted(finished)


def test_a_pull_that_is_not_served_is_computed_again(pair: Service, colocated: Service, is_idle):

    def take_away(dask_worker) -> None:
        dask_worker.handlers["away"] = dask_worker.handlers.pop(OPERATION)

    def give_back(dask_worker) -> None:
        dask_worker.handlers[OPERATION] = dask_worker.handlers.pop("away")

    on_prefill(pair, take_away)
    try:
        completion = pair.submit("hello", PARAMS).result()
    finally:
        on_prefill(pair, give_back)
    assert completion.text == expected(colocated, ["hello"])[0]
    assert completion.timeline.num_recomputes == 1
    assert pair.submit("hello", PARAMS).result().timeline.num_recomputes == 0


def test_other_bytes_than_were_computed_are_never_believed(
    pair: Service, colocated: Service, is_idle, eventually
):
    """One flipped bit in the KV between prefill and pull."""

    def spoil(dask_worker) -> None:
        server = dask_worker.handlers[OPERATION].__self__
        honest = server._export

        def export(handle):
            views = [bytearray(view) for view in honest(handle)]
            views[-1][-1] ^= 1
            server._export = honest
            return [memoryview(view) for view in views]

        server._export = export

    for prompt in ("hello", "x" * 100):
        on_prefill(pair, spoil)
        completion = pair.submit(prompt, PARAMS).result()
        assert completion.text == expected(colocated, [prompt])[0]
        assert completion.timeline.num_recomputes == 1
    eventually(lambda: is_idle(pair))


@pytest.mark.slow
def test_an_expired_lease_is_computed_again(attach, mock, colocated: Service, is_idle, eventually):
    """The lease is shorter than the wait for a decode slot, and other prompts take the pages."""
    config = mock(num_kv_blocks=24, kv_lease_s=0.05, mock_decode_s=0.01)
    prompts = [f"prompt number {i} " * 3 for i in range(12)]
    with attach(config, slots=2, prefill=1, decode=1) as service:
        texts = [c.text for c in service.client.gather(service.map(prompts, PARAMS))]
        assert texts == expected(colocated, prompts)
        eventually(lambda: is_idle(service))


@pytest.mark.slow
def test_leases_are_renewed_while_their_decode_waits(attach, mock):
    config = mock(num_kv_blocks=24, kv_lease_s=0.4, mock_decode_s=0.01)
    with (
        dask.config.set({"daskserve.service.lease-renewal-s": 0.05}),
        attach(config, slots=1, prefill=1, decode=1) as service,
    ):
        futures = service.map(["hello there"] * 4, SamplingParams(max_tokens=40))
        completions = service.client.gather(futures)
        assert [c.timeline.num_recomputes for c in completions] == [0] * 4


def test_kv_that_died_with_its_worker_is_prefilled_again(attach, mock, eventually):
    """Dask has a copy of the handle elsewhere and thinks the result safe; the KV is gone."""
    config = mock(mock_decode_s=0.02)
    with attach(config, slots=1, prefill=2, decode=1) as service:
        first = service.submit("hello", SamplingParams(max_tokens=40))
        second = service.submit("hello", SamplingParams(max_tokens=40))
        handle = service.prefill_future(second).result().handle
        service.client.replicate([service.prefill_future(second)], n=3)

        def close(dask_worker) -> None:
            dask_worker.loop.add_callback(dask_worker.close, nanny=False)

        service.client.run(close, workers=[handle.instance_address])
        assert second.result().text == first.result().text
        assert second.result().timeline.num_recomputes == 0
        again = service.prefill_future(second).result().handle
        assert again.instance_address != handle.instance_address


def lose_result(service: Service, key: str) -> None:
    """As if the worker with the only copy of a task's result had died."""

    def lose(dask_scheduler) -> None:
        dask_scheduler.transitions({key: "released"}, stimulus_id="test")

    service.client.run_on_scheduler(lose)


def test_a_result_outlives_the_loss_of_its_prefill(pair: Service, is_idle, eventually):
    """Dask would prefill again for a caller who holds that future too; nobody needs it."""
    future = pair.submit("hello", PARAMS)
    wait([future])
    lose_result(pair, pair.prefill_future(future).key)
    eventually(lambda: is_idle(pair))
    assert future.result().num_output_tokens == 12
    lose_result(pair, future.key)
    wait([future])
    assert future.result().num_output_tokens == 12
    eventually(lambda: is_idle(pair))


def test_a_prefill_lost_while_its_kv_waits_is_repeated_and_leaves_nothing(
    attach, mock, is_idle, eventually
):
    with attach(mock(mock_decode_s=0.02), slots=1, prefill=2, decode=1) as service:
        first = service.submit("hello", SamplingParams(max_tokens=40))
        second = service.submit("hello", SamplingParams(max_tokens=40))
        wait([service.prefill_future(second)])
        lose_result(service, service.prefill_future(second).key)
        assert second.result().text == first.result().text
        eventually(lambda: is_idle(service))
        used = service.status()["dispatch"]["roles"]["PREFILL"]
        assert used["used_kv_blocks"] == used["held_kv_blocks"] == 0


def test_refused_by_decode_after_its_prefill_everything_is_free(pair: Service, is_idle, eventually):
    """Too large for any decode instance, which only the far side notices here."""
    request = pair.validate([5] * 200, PARAMS)
    request = replace(request, params=SamplingParams(max_tokens=2000))
    [future] = pair.submit_requests([request])
    with pytest.raises(NeverFits, match=r"\d+ KV blocks"):
        future.result(timeout=5)
    eventually(lambda: is_idle(pair))


def test_a_request_that_the_engine_refuses_fails_alone(pair: Service, is_idle, eventually):
    bad = replace(pair.validate("hello", PARAMS), prompt_token_ids=(10**6,))
    good = pair.validate("hello", PARAMS)
    futures = pair.submit_requests([bad, good])
    with pytest.raises(InvalidParameter, match="token ids"):
        futures[0].result(timeout=5)
    assert futures[1].result().num_output_tokens == 12
    eventually(lambda: is_idle(pair))


def test_a_request_shows_neither_prompt_nor_secret_where_dask_logs_it(pair: Service):
    request = pair.validate([71, 72, 73], PARAMS)
    shown = repr(replace(request, token_sink="127.0.0.1:1/ab12"))
    assert "prompt_token_ids" not in shown and "ab12" not in shown


@pytest.mark.slow
def test_nothing_is_left_on_the_scheduler(pair: Service, is_idle, eventually):
    def count(dask_scheduler) -> dict[str, int]:
        return {
            "tasks": len(dask_scheduler.tasks),
            "prefixes": len(dask_scheduler.task_prefixes),
            "groups": len(dask_scheduler.task_groups),
        }

    pair.submit("hello", PARAMS).result()
    gc.collect()
    time.sleep(0.1)
    before = pair.client.run_on_scheduler(count)
    known = set(pair.client.futures)
    futures = pair.map([f"prompt {i}" for i in range(100)], PARAMS)
    pair.client.cancel(futures[::3])
    pair.client.gather(futures, errors="skip")
    del futures
    gc.collect()
    eventually(lambda: pair.client.run_on_scheduler(count) == before)
    eventually(lambda: is_idle(pair))
    assert set(pair.client.futures) == known


@pytest.fixture(scope="module")
def llamas(attach) -> Iterator[tuple[Service, Service]]:
    config = EngineConfig(model="tiny-random-llama", dtype="float32", num_kv_blocks=100)
    with (
        attach(config, prefill=1, decode=2) as disaggregated,
        attach(config, colocated=1) as together,
    ):
        yield disaggregated, together


@pytest.mark.slow
def test_a_real_model_says_the_same_either_way(llamas):
    disaggregated, together = llamas
    prompts = ["a", "The quick brown fox", "x" * 90, [5, 6, 7]]
    for params in (PARAMS, SamplingParams(max_tokens=12, temperature=0.9, seed=7)):
        answers = disaggregated.client.gather(disaggregated.map(prompts, params))
        reference = together.client.gather(together.map(prompts, params))
        assert [a.token_ids for a in answers] == [r.token_ids for r in reference]
        assert all(a.timeline.num_recomputes == 0 for a in answers)
