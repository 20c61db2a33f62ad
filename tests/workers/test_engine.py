"""What an engine does with requests: order, memory, endings, refusals, failures."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from daskserve.core.instance import Role
from daskserve.core.request import FinishReason
from daskserve.errors import (
    ContextOverflow,
    EngineStepFailed,
    InvalidParameter,
    KVUnavailable,
    NeverFits,
    RequestCancelled,
)
from daskserve.workers.sequence import Sequence

MODES = ["whole", "chunked", "disaggregated"]


@pytest.fixture
def make_rig(rig_type, make_engine):
    """``make_rig(mode, **settings)``: the engines of one way to serve."""

    def make(mode: str, pulls_ok=None, **settings):
        if mode == "disaggregated":
            engines = [make_engine(role, **settings) for role in (Role.PREFILL, Role.DECODE)]
        else:
            chunk = 16 if mode == "chunked" else None
            engines = [make_engine(Role.COLOCATED, chunk_tokens=chunk, **settings)]
        return rig_type(*engines, pulls_ok=pulls_ok)

    return make


def count_forward_tokens(engine) -> list[int]:
    """Tokens of every prompt step from now on."""
    counts: list[int] = []
    forward = engine.runner.forward

    def counting(batch):
        if not batch.is_decode:
            counts.append(batch.num_tokens)
        return forward(batch)

    engine.runner.forward = counting
    return counts


@pytest.mark.parametrize("mode", MODES)
def test_a_pool_of_one_and_a_half_requests_serves_twenty(mode, make_rig, make_request) -> None:
    rig = make_rig(mode, num_kv_blocks=6, block_size=8)
    for index in range(20):
        rig.submit(make_request(f"r{index}", 20, max_tokens=13))
    outcomes = rig.run()
    assert sorted(outcomes) == sorted(f"r{index}" for index in range(20))
    assert all(outcome.num_output_tokens == 13 for outcome in outcomes.values())
    assert rig.used_blocks() == 0


def test_two_that_cannot_both_fit_finish_with_little_recomputed(make_rig, make_request) -> None:
    rig = make_rig("whole", num_kv_blocks=10, block_size=8)
    counts = count_forward_tokens(rig.entry)
    for name in ("a", "b"):
        rig.submit(make_request(name, 30, max_tokens=40))
    outcomes = rig.run()
    assert [outcomes[name].num_output_tokens for name in ("a", "b")] == [40, 40]
    assert sum(outcomes[name].timeline.num_recomputes for name in ("a", "b")) == 1
    assert sum(counts) <= 2 * (30 + 30)


def test_the_last_admitted_is_preempted_and_repeats_its_tokens(make_rig, make_request) -> None:
    request = make_request("late", 30, max_tokens=40, temperature=1.0, seed=5)
    alone = make_rig("whole")
    alone.submit(request)
    rig = make_rig("whole", num_kv_blocks=10, block_size=8)
    rig.submit(make_request("early", 30, max_tokens=40))
    rig.submit(request)
    outcomes = rig.run()
    assert outcomes["early"].timeline.num_recomputes == 0
    assert outcomes["late"].timeline.num_recomputes == 1
    assert outcomes["late"].token_ids == alone.run()["late"].token_ids


def test_a_preempted_request_goes_before_those_that_came_after_it(make_rig, make_request) -> None:
    rig = make_rig("whole", num_kv_blocks=10, block_size=8)
    for name in ("early", "late", "after"):
        rig.submit(make_request(name, 30, max_tokens=40))
    outcomes = rig.run()
    assert outcomes["late"].timeline.num_recomputes == 1
    assert list(outcomes) == ["early", "late", "after"], "in the order in which they ended"


def test_prompts_are_batched_up_to_the_budget(make_rig, make_request) -> None:
    rig = make_rig("disaggregated", prefill_budget_tokens=100)
    counts = count_forward_tokens(rig.entry)
    for index, length in enumerate([40, 60, 2, 150, 30]):
        rig.submit(make_request(f"r{index}", length, max_tokens=1))
    rig.run()
    assert counts == [100, 2, 150, 30]


def test_prompts_wait_while_held_kv_fills_the_pool(make_rig, make_request) -> None:
    rig = make_rig("disaggregated", pulls_ok=lambda _: None, num_kv_blocks=4, block_size=8)
    for index in range(3):
        rig.submit(make_request(f"r{index}", 16, max_tokens=4))
    rig.step()
    prefill = rig.by_role[Role.PREFILL]
    rig.step()
    assert (prefill.load.num_holding, prefill.load.num_waiting) == (2, 1)
    rig.end_pull(0, True)
    rig.step()
    assert prefill.load.num_waiting == 0


def test_expiry_is_by_each_ones_own_deadline(make_rig, make_request) -> None:
    rig = make_rig("disaggregated", pulls_ok=lambda _: None, kv_lease_s=10, kv_pull_timeout_s=8)
    del rig.by_role[Role.DECODE]
    for index in range(6):
        rig.submit(make_request(f"r{index}", 8, max_tokens=4))
    rig.run()
    prefill = rig.entry
    slow = rig.outcomes["r0"][0].handle
    abandoned = rig.outcomes["r1"][0].handle
    for _ in range(5):
        rig.now += 4.0
        prefill.holding.pin(slow, rig.now)  # a live transfer renews
        rig.step()
    assert prefill.load.num_holding == 1
    with pytest.raises(KVUnavailable, match="expired"):
        prefill.holding.pin(abandoned, rig.now)
    rig.now += 8.0
    rig.step()
    assert prefill.load.used_kv_blocks == 0


def test_kept_kv_outlives_its_first_lease_and_no_longer(make_rig, make_request) -> None:
    rig = make_rig("disaggregated", pulls_ok=lambda _: None, kv_lease_s=10)
    del rig.by_role[Role.DECODE]
    for name in ("kept", "not kept"):
        rig.submit(make_request(name, 8, max_tokens=4))
    rig.run()
    rig.now = 8.0
    rig.entry.holding.keep(["kept", "unknown"], rig.now)
    for now, holding in [(17.0, 1), (18.0, 0)]:
        rig.now = now
        rig.step()
        assert rig.entry.load.num_holding == holding


def test_one_token_never_reaches_decode(make_rig, make_request) -> None:
    rig = make_rig("disaggregated")
    rig.submit(make_request("one", 20, max_tokens=1), streams=True)
    answer = rig.run()["one"]
    assert (answer.num_output_tokens, answer.finish_reason) == (1, FinishReason.LENGTH)
    assert len(rig.deltas["one"]) == 1
    assert rig.by_role[Role.DECODE].load.num_steps == 0
    assert rig.used_blocks() == 0


@pytest.mark.parametrize("mode", MODES)
def test_deltas_join_to_the_answer(mode, make_rig, make_request) -> None:
    rig = make_rig(mode)
    for index in range(20):
        rig.submit(make_request(f"r{index}", 5 + index, max_tokens=7 + index), streams=True)
    for request_id, answer in rig.run().items():
        deltas = rig.deltas[request_id]
        assert tuple(i for delta in deltas for i in delta.token_ids) == answer.token_ids
        assert [delta.first_index for delta in deltas] == list(range(len(deltas)))
        assert "".join(delta.text for delta in deltas) == answer.text
        assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]


@pytest.mark.parametrize("mode", MODES)
def test_stop_strings_end_the_text_before_them(mode, make_rig, make_request) -> None:
    free = make_rig("whole")
    free.submit(make_request("r", 10, max_tokens=30))
    text = free.run()["r"].text
    for start, length in [(0, 1), (0, 3), (7, 1), (7, 4)]:
        rig = make_rig(mode)
        stop = text[start : start + length]
        rig.submit(make_request("r", 10, max_tokens=30, stop=(stop, "NEVER")), streams=True)
        answer = rig.run()["r"]
        assert answer.finish_reason is FinishReason.STOP
        assert answer.text == text[: text.index(stop)]
        assert answer.num_output_tokens == text.index(stop) + length
        assert "".join(delta.text for delta in rig.deltas["r"]) == answer.text


def test_end_of_sequence_ends_unless_ignored(make_engine, rig_type, make_request) -> None:
    engine = make_engine(Role.COLOCATED)
    (eos,) = engine.runner.shape.eos_token_ids
    forward = engine.runner.forward

    def ends_at_position_11(batch):
        logits = forward(batch)
        logits[torch.from_numpy(batch.context_tokens) >= 12, eos] = 100.0
        return logits

    engine.runner.forward = ends_at_position_11
    rig = rig_type(engine)
    rig.submit(make_request("ends", 10, max_tokens=20))
    rig.submit(make_request("goes on", 10, max_tokens=20, ignore_eos=True))
    outcomes = rig.run()
    assert (outcomes["ends"].token_ids[-1], outcomes["ends"].num_output_tokens) == (eos, 3)
    assert outcomes["ends"].finish_reason is FinishReason.STOP
    assert outcomes["goes on"].num_output_tokens == 20


def test_equal_prompts_are_sampled_independently(make_rig, make_request) -> None:
    rig = make_rig("whole")
    prompt = tuple(range(10, 30))
    for index in range(4):
        rig.submit(make_request(f"r{index}", prompt, seed=index, max_tokens=20, temperature=1.0))
    assert len({answer.token_ids for answer in rig.run().values()}) == 4


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_decides_the_tokens_whatever_the_batch(mode, make_rig, make_request) -> None:
    def answer(neighbours: int) -> tuple[int, ...]:
        rig = make_rig(mode)
        for index in range(neighbours):
            rig.submit(make_request(f"n{index}", 9 + index, max_tokens=5, temperature=1.0))
        settings = dict(max_tokens=25, temperature=0.9, top_p=0.9, top_k=20)
        rig.submit(make_request("r", 20, seed=3, **settings))
        return rig.run()["r"].token_ids

    assert answer(0) == answer(5)


def test_refusals_say_the_numbers(make_rig, make_request) -> None:
    rig = make_rig("whole", num_kv_blocks=4, block_size=8)
    rig.submit(make_request("big", 30, max_tokens=10))
    rig.submit(make_request("long", 8000, max_tokens=1000))
    rig.submit(make_request("foreign", (5, 10_000), max_tokens=1))
    rig.submit(make_request("negative", (5, -1), max_tokens=1))
    rig.submit(make_request("fits", 30, max_tokens=3))
    outcomes = rig.run()
    assert isinstance(outcomes["big"], NeverFits) and "5 KV blocks" in str(outcomes["big"])
    assert isinstance(outcomes["long"], ContextOverflow) and "8192" in str(outcomes["long"])
    assert isinstance(outcomes["foreign"], InvalidParameter)
    assert isinstance(outcomes["negative"], InvalidParameter)
    assert outcomes["fits"].num_output_tokens == 3


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_step_fails_its_batch_only(mode, make_rig, make_request) -> None:
    rig = make_rig(mode)
    last = list(rig.by_role.values())[-1]
    forward = last.runner.forward

    def fails_once(batch):
        last.runner.forward = forward
        raise RuntimeError("boom")

    rig.submit(make_request("a", 10, max_tokens=5))
    rig.submit(make_request("b", 10, max_tokens=5))
    last.runner.forward = fails_once
    failed = rig.run()
    assert {type(outcome) for outcome in failed.values()} == {EngineStepFailed}
    assert "boom" in str(failed["a"])
    assert rig.used_blocks() == 0
    rig.submit(make_request("c", 10, max_tokens=5))
    assert rig.run()["c"].num_output_tokens == 5


def test_logits_that_are_not_finite_fail_one_request(make_engine, rig_type, make_request) -> None:
    engine = make_engine(Role.COLOCATED)
    forward = engine.runner.forward

    def poisoned(batch):
        logits = forward(batch)
        logits[torch.from_numpy(batch.context_tokens) == 13] = math.nan
        return logits

    engine.runner.forward = poisoned
    rig = rig_type(engine)
    rig.submit(make_request("poison", 10, max_tokens=20))
    rig.submit(make_request("neighbour", 20, max_tokens=20))
    outcomes = rig.run()
    assert isinstance(outcomes["poison"], EngineStepFailed)
    assert outcomes["neighbour"].num_output_tokens == 20


def test_a_failed_pull_is_computed_again(make_rig, make_request) -> None:
    whole = make_rig("whole")
    rig = make_rig("disaggregated", pulls_ok=lambda request_id: request_id != "r1")
    for each in (whole, rig):
        for index in range(3):
            each.submit(make_request(f"r{index}", 20, max_tokens=8))
    expected, outcomes = whole.run(), rig.run()
    for request_id, answer in outcomes.items():
        assert answer.token_ids == expected[request_id].token_ids
        assert answer.timeline.num_recomputes == (request_id == "r1")


def test_a_forged_handle_is_not_pulled(make_rig, make_request) -> None:
    rig = make_rig("disaggregated")
    decode = rig.by_role[Role.DECODE]
    prefill = make_rig("disaggregated")
    del prefill.by_role[Role.DECODE]
    prefill.submit(make_request("r", 20, max_tokens=8))
    prefill.run()
    good = prefill.outcomes["r"][0]
    forged = [
        dict(num_tokens=10**9),
        dict(num_tokens=-1),
        dict(kv_layout="other"),
        dict(request_id="someone else"),
    ]
    for change in forged:
        handle = dataclasses.replace(good.handle, **change)
        request = make_request("r", 20, max_tokens=8)
        first = [good.first_token_id]
        decode.add(Sequence(request, handle=handle, output_ids=first, first_token_at=0.0))
        answer = rig.run()["r"]
        assert (answer.num_output_tokens, answer.timeline.num_recomputes) == (8, 1)
        assert not rig.open_pulls
    decode.add(Sequence(request, handle=good.handle, output_ids=[-5], first_token_at=0.0))
    assert isinstance(rig.run()["r"], InvalidParameter)


def test_a_lone_row_waits_for_pages_under_a_pull(make_rig, make_request) -> None:
    rig = make_rig(
        "disaggregated",
        pulls_ok=lambda request_id: True if request_id == "first" else None,
        num_kv_blocks=7,
        block_size=4,
    )
    rig.submit(make_request("first", 7, max_tokens=18))
    rig.step()
    rig.submit(make_request("second", 11, max_tokens=4))
    for _ in range(40):
        rig.step()
    assert rig.by_role[Role.DECODE].load.num_running == 2
    rig.end_pull(0, True)
    outcomes = rig.run()
    assert outcomes["first"].num_output_tokens == 18
    assert outcomes["second"].num_output_tokens == 4


def test_pages_of_an_aborted_pull_stay_reserved_until_it_ends(make_rig, make_request) -> None:
    rig = make_rig("disaggregated", pulls_ok=lambda _: None)
    rig.submit(make_request("r", 20, max_tokens=4))
    rig.step()
    rig.step()
    decode = rig.by_role[Role.DECODE]
    rig.abort("r")
    assert isinstance(rig.outcomes["r"][-1], RequestCancelled)
    assert decode.load.used_kv_blocks == 2
    rig.end_pull(0, False)
    assert decode.load.used_kv_blocks == 0


def test_a_second_submission_of_an_id_supersedes_the_first(make_rig, make_request) -> None:
    rig = make_rig("whole")
    rig.submit(make_request("r", 20, max_tokens=50))
    rig.step()
    rig.submit(make_request("r", 20, max_tokens=4))
    rig.run()
    first, second = rig.outcomes["r"]
    assert isinstance(first, RequestCancelled)
    assert second.num_output_tokens == 4
    assert rig.used_blocks() == 0


@pytest.mark.parametrize("mode", MODES)
def test_stages_add_up_to_the_whole(mode, make_rig, make_request) -> None:
    rig = make_rig(mode)
    for engine in rig.by_role.values():
        forward = engine.runner.forward

        def takes_a_second(batch, forward=forward):
            rig.now += 1.0
            return forward(batch)

        engine.runner.forward = takes_a_second
    for index in range(3):
        rig.submit(make_request(f"r{index}", 500, max_tokens=4))
    for request_id, answer in rig.run().items():
        timeline = answer.timeline
        assert timeline.prefill_s >= 1.0 and timeline.decode_s >= 3.0
        assert timeline.total_s <= rig.now
        assert timeline.ttft_s >= 1.0 and answer.tpot_s >= 1.0, request_id
    assert max(a[-1].timeline.total_s for a in rig.outcomes.values()) == rig.now
