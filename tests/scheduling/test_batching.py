import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from daskserve.core.kv import blocks_for
from daskserve.scheduling import batching

lengths = st.lists(st.integers(1, 4000), max_size=30)
BLOCK = 16


@given(lengths, st.integers(1, 2048), st.integers(0, 600), st.integers(1, 16))
def test_prefill_batch_keeps_order_budget_and_memory(prompts, budget, free, most):
    taken = batching.prefill_batch_size(prompts, budget, free, BLOCK, most)
    batch = prompts[:taken]
    assert taken <= most
    assert sum(blocks_for(n, BLOCK) for n in batch) <= free
    assert taken <= 1 or sum(batch) <= budget


@given(lengths, st.integers(1, 2048), st.integers(0, 600), st.integers(1, 16))
def test_prefill_batch_is_as_large_as_the_limits_allow(prompts, budget, free, most):
    taken = batching.prefill_batch_size(prompts, budget, free, BLOCK, most)
    if taken == len(prompts) or taken == most:
        return
    longer = prompts[: taken + 1]
    over_memory = sum(blocks_for(n, BLOCK) for n in longer) > free
    over_budget = taken > 0 and sum(longer) > budget
    assert over_memory or over_budget


def test_a_prompt_longer_than_the_budget_runs_alone():
    assert batching.prefill_batch_size([900, 10], 512, 1000, BLOCK, 8) == 1
    assert batching.prefill_batch_size([10, 900], 512, 1000, BLOCK, 8) == 1


def test_a_lone_request_is_admitted_whatever_the_reserve():
    assert batching.decode_admissions([10], 10, 0, 8, reserve_blocks=5) == 1
    assert batching.decode_admissions([10], 10, 1, 8, reserve_blocks=5) == 0


@given(
    st.lists(st.integers(1, 50), max_size=20),
    st.integers(0, 400),
    st.integers(0, 8),
    st.integers(1, 8),
    st.integers(0, 8),
)
def test_admissions_never_exceed_memory_or_slots(need, free, running, most, reserve):
    admitted = batching.decode_admissions(need, free, running, most, reserve)
    assert sum(need[:admitted]) <= free
    assert admitted == 0 or running + admitted <= most


@given(st.lists(st.integers(0, 1000), unique=True, max_size=20))
def test_the_youngest_is_preempted_and_a_lone_request_never(order):
    victim = batching.preemption_victim(order)
    if len(order) < 2:
        assert victim == batching.NONE
    else:
        assert order[victim] == max(order)


@given(st.integers(1, 5000), st.integers(1, 600), st.integers(0, 600))
def test_a_chunk_always_makes_progress_and_stays_in_the_budget(remaining, budget, decoding):
    chunk = batching.chunk_tokens(remaining, budget, decoding)
    assert 1 <= chunk <= remaining
    assert chunk == 1 or chunk + decoding <= budget


def test_the_compiled_policies_decide_like_the_interpreted_ones():
    from numba import njit

    random = np.random.default_rng(7)
    compiled = {
        function: njit(function)
        for function in (
            batching.prefill_batch_size,
            batching.decode_admissions,
            batching.preemption_victim,
            batching.chunk_tokens,
        )
    }
    for _ in range(300):
        sizes = random.integers(1, 2000, size=random.integers(0, 20))
        blocks = -(-sizes // BLOCK)
        free, most = int(random.integers(0, 500)), int(random.integers(1, 12))
        calls = {
            batching.prefill_batch_size: (sizes, int(random.integers(1, 2000)), free, BLOCK, most),
            batching.decode_admissions: (blocks, free, int(random.integers(0, 9)), most, 2),
            batching.preemption_victim: (random.permutation(len(sizes)),),
            batching.chunk_tokens: (int(random.integers(1, 2000)), most * 50, free),
        }
        for function, arguments in calls.items():
            assert compiled[function](*arguments) == function(*arguments)
