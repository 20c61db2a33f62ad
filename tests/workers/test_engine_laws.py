"""Laws of the engine under any order of events: nothing leaks, everything ends once, exactly."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskserve.core.instance import Role
from daskserve.core.request import Completion
from daskserve.errors import NeverFits, RequestCancelled

BLOCK = 4
POOL = 12  # pages of 4 tokens

submits = st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 30))
operations = st.lists(
    st.one_of(
        submits,
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("step"), st.integers(1, 8)),
        st.tuples(st.just("pull"), st.integers(0, 20), st.booleans()),
        st.tuples(st.just("wait"), st.sampled_from([0.1, 5.0])),
    ),
    max_size=40,
)


@pytest.fixture(scope="module")
def solo(rig_type, make_engine, make_request):
    """The answer of a request alone on an idle engine."""

    @functools.cache
    def answer(request_id: str, length: int, max_tokens: int) -> tuple[int, ...]:
        rig = rig_type(make_engine(Role.COLOCATED, block_size=BLOCK))
        rig.submit(make_request(request_id, length, max_tokens=max_tokens))
        return rig.run()[request_id].token_ids

    return answer


def play(rig, make_request, script) -> list[tuple[str, int, int]]:
    """Run a script of operations; what was submitted."""
    submitted = []
    for name, *arguments in script:
        if name == "submit":
            request_id = f"r{len(submitted)}"
            submitted.append((request_id, *arguments))
            rig.submit(make_request(request_id, arguments[0], max_tokens=arguments[1]))
        elif name == "abort":
            rig.abort(f"r{arguments[0]}")
        elif name == "step":
            for _ in range(arguments[0]):
                rig.step()
        elif name == "pull" and rig.open_pulls:
            rig.end_pull(arguments[0] % len(rig.open_pulls), arguments[1])
        elif name == "wait":
            rig.now += arguments[0]
    return submitted


def check_end(rig, submitted, solo) -> None:
    for request_id, length, max_tokens in submitted:
        outcomes = rig.outcomes[request_id]
        assert len(outcomes) == 1, "every request ends once"
        if isinstance(outcomes[0], Completion):
            assert outcomes[0].token_ids == solo(request_id, length, max_tokens)
            assert length + max_tokens - 1 <= POOL * BLOCK
        elif not isinstance(outcomes[0], RequestCancelled):
            assert isinstance(outcomes[0], NeverFits)
            assert length + max_tokens - 1 > POOL * BLOCK
    for engine in rig.by_role.values():
        load = engine.load
        assert (load.num_waiting, load.num_running, load.num_holding) == (0, 0, 0)
        assert (load.waiting_tokens, load.used_kv_blocks) == (0, 0)
        assert engine.num_sequences == 0 and engine.pool.num_free == POOL


@given(operations, st.sampled_from([None, 1, 5, 8]), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=100)
def test_colocated(
    rig_type, make_engine, make_request, solo, script, chunk, max_batch, max_open
) -> None:
    engine = make_engine(
        Role.COLOCATED,
        max_open=max_open,
        num_kv_blocks=POOL,
        block_size=BLOCK,
        chunk_tokens=chunk,
        max_batch_size=max_batch,
        prefill_budget_tokens=16,
    )
    rig = rig_type(engine)
    submitted = play(rig, make_request, script)
    rig.run()
    check_end(rig, submitted, solo)


@given(operations, st.integers(1, 4), st.booleans(), st.integers(1, 3))
@settings(max_examples=160)
def test_disaggregated(
    rig_type, make_engine, make_request, solo, script, max_batch, is_overlapped, max_open
) -> None:
    shared = dict(num_kv_blocks=POOL, block_size=BLOCK, kv_lease_s=7.0, kv_pull_timeout_s=7.0)
    shared["max_open"] = max_open
    prefill = make_engine(Role.PREFILL, prefill_budget_tokens=16, **shared)
    decode = make_engine(Role.DECODE, max_batch_size=max_batch, **shared)
    rig = rig_type(prefill, decode, pulls_ok=lambda request_id: None)
    rig.is_overlapped = is_overlapped  # requests come to DECODE while it computes
    submitted = play(rig, make_request, script)
    while rig.step() or rig.open_pulls:
        while rig.open_pulls:
            rig.end_pull(0, True)
    rig.now += 100.0  # what was prefilled and then aborted at DECODE is released by its lease
    rig.run()
    check_end(rig, submitted, solo)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(2, 12)), min_size=2, max_size=12),
    st.sampled_from(["whole", "chunked", "disaggregated"]),
)
@settings(max_examples=60)
def test_requests_start_in_the_order_of_arrival(
    rig_type, make_engine, make_request, sizes, mode
) -> None:
    shared = dict(num_kv_blocks=POOL, block_size=BLOCK, max_batch_size=3, prefill_budget_tokens=16)
    if mode == "disaggregated":
        engines = [make_engine(Role.PREFILL, **shared), make_engine(Role.DECODE, **shared)]
    else:
        chunk = 8 if mode == "chunked" else None
        engines = [make_engine(Role.COLOCATED, chunk_tokens=chunk, **shared)]
    rig = rig_type(*engines)
    tick = iter(range(10**9))
    for engine in engines:
        engine.clock = lambda: float(next(tick))
    for index, (length, max_tokens) in enumerate(sizes):
        rig.submit(make_request(f"r{index}", length, max_tokens=max_tokens))
    rig.run()
    starts = [s.prefill_started_at for s in rig.started if s.prefill_started_at is not None]
    assert starts == sorted(starts)


def test_requests_that_come_during_a_step_miss_only_that_one(
    rig_type, make_engine, make_request, solo
) -> None:
    shared = dict(block_size=BLOCK)
    rig = rig_type(make_engine(Role.PREFILL, **shared), make_engine(Role.DECODE, **shared))
    rig.is_overlapped = True
    rig.submit(make_request("r0", 5, max_tokens=20))
    for _ in range(4):
        rig.step()
    decode = rig.by_role[Role.DECODE]
    rig.submit(make_request("r1", 7, max_tokens=5))
    rig.step()
    assert rig.num_early == 2 and decode.load.num_running == 2
    answers = rig.run()
    assert answers["r0"].token_ids == solo("r0", 5, 20)
    assert answers["r1"].token_ids == solo("r1", 7, 5)
