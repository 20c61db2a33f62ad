"""Threads of a team meet at the barrier, also when one is late enough for the others to sleep."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from daskserve.workers.kernels.jit import kernel
from daskserve.workers.kernels.team import Team, atomic_add, atomic_load, share, wait_for_all


@kernel
def _count(thread, num_threads, sync, total, rounds, late):
    """Add 1 per round and thread; every thread must then see the whole round."""
    for number in range(rounds):
        spins = 0
        while thread == 0 and spins < late:
            spins += 1 + 0 * atomic_load(total)
        atomic_add(total, 1)
        wait_for_all(sync, num_threads)
        if atomic_load(total) != (number + 1) * num_threads:
            atomic_add(total + 8, 1)
        wait_for_all(sync, num_threads)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(("rounds", "late"), [(300, 0), (3, 5_000_000)])
def test_nobody_passes_before_all_have_come(num_threads: int, rounds: int, late: int) -> None:
    team = Team(num_threads)
    totals = np.zeros(2, dtype=np.int64)
    arguments = (num_threads, team.sync.ctypes.data, totals.ctypes.data, rounds, late)
    team.run(_count, *arguments)
    team.run(_count, num_threads, team.sync.ctypes.data, totals[:0].ctypes.data, 0, 0)
    assert totals.tolist() == [rounds * num_threads, 0]


def test_the_shared_words_stay_until_the_last_thread_has_left() -> None:
    team, gate, has_left = Team(2), threading.Event(), threading.Event()
    words = weakref.ref(team.sync)

    def leave_late(thread: int) -> None:
        if thread > 0:
            gate.wait()
            has_left.set()

    team.run(leave_late)
    del team
    gc.collect()
    assert words() is not None
    gate.set()
    assert has_left.wait(10)
    deadline = time.monotonic() + 10
    while words() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert words() is None


@pytest.mark.parametrize("count", [0, 1, 7, 64])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_shares_cover_everything_once(count: int, num_threads: int) -> None:
    parts = [share(count, thread, num_threads) for thread in range(num_threads)]
    assert [n for low, high in parts for n in range(low, high)] == list(range(count))
    assert max(b - a for a, b in parts) - min(b - a for a, b in parts) <= 1
