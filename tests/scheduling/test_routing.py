import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from daskserve.scheduling.batching import NONE
from daskserve.scheduling.routing import least_loaded, shortest_queue

queues = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=8)
decoders = st.lists(
    st.tuples(st.integers(0, 100), st.integers(1, 100), st.integers(0, 4), st.integers(1, 4)),
    max_size=8,
)


@given(queues)
def test_prefill_goes_to_the_fewest_queued_tokens(instances):
    tokens, requests = [t for t, _ in instances], [r for _, r in instances]
    choice = shortest_queue(tokens, requests)
    if not instances:
        assert choice == NONE
    else:
        assert choice == min(range(len(tokens)), key=lambda i: (tokens[i], requests[i], i))


@given(decoders, st.integers(1, 60))
def test_decode_goes_to_the_least_loaded_that_has_room(instances, need):
    used, total, running, most = ([row[k] for row in instances] for k in range(4))
    choice = least_loaded(used, total, running, most, need)
    room = [i for i in range(len(used)) if running[i] < most[i] and used[i] + need <= total[i]]
    if not room:
        assert choice == NONE
    else:
        best = min(room, key=lambda i: (used[i] / total[i], running[i], i))
        assert (used[choice] / total[choice], running[choice]) == (
            used[best] / total[best],
            running[best],
        )


def test_the_compiled_policies_decide_like_the_interpreted_ones():
    from numba import njit

    fast_queue, fast_load = njit(shortest_queue), njit(least_loaded)
    random = np.random.default_rng(11)
    for _ in range(300):
        size = int(random.integers(0, 9))
        a, b, c, d = (random.integers(0, 40, size=size) for _ in range(4))
        assert fast_queue(a, b) == shortest_queue(a, b)
        need = int(random.integers(1, 20))
        assert fast_load(a, b + 1, c, d, need) == least_loaded(a, b + 1, c, d, need)
