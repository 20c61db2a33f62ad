"""Threads that run one kernel together: a barrier and a shared counter inside, no OpenMP.

torch's own thread pool spins for a while after each operator; a second pool beside it would
fight it for the cores. Kernels that run a whole step need only plain threads without the GIL.
"""

from __future__ import annotations

import platform
import queue
import sys
import threading
import weakref
from collections.abc import Callable

import numpy as np
from numba import types

from daskserve.workers.kernels.cpu import IS_X86
from daskserve.workers.kernels.jit import kernel
from daskserve.workers.kernels.vector import call_llvm, define, i64, ir

COUNTER, _ARRIVED, _GENERATION, _SLEEPERS, SYNC_WORDS = 0, 16, 32, 40, 48
"""Indices of the shared words; those that different threads write are cache lines apart."""
_SPINS_BEFORE_SLEEP = 1000  # some 50 us: longer than the parts of a step differ on a free core

_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}
_FUTEX = _FUTEX_CALLS.get(platform.machine(), 0) if sys.platform == "linux" else 0
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129
_system_call = types.ExternalFunction("syscall", types.int64(*(types.int64,) * 7))
_yield_core = types.ExternalFunction("sched_yield", types.int32())


@define(types.int64, types.int64, types.int64)
def atomic_add(builder, address, amount):
    """Add to a shared int64; returns what it held before."""
    pointer = builder.inttoptr(address, i64.as_pointer())
    return builder.atomic_rmw("add", pointer, amount, "seq_cst")


@define(types.int64, types.int64)
def atomic_load(builder, address):
    """Read a shared int64 that other threads write."""
    pointer = builder.inttoptr(address, i64.as_pointer())
    return builder.load_atomic(pointer, "seq_cst", 8)


@kernel
def reset(address):
    """Set a shared int64 to 0 while no other thread uses it."""
    atomic_add(address, -atomic_load(address))


@define(types.void)
def _pause(builder):
    if IS_X86:
        call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])


@kernel
def wait_for_all(sync, num_threads):
    """Return once all threads of the team are here; ``sync`` is the address of its words.

    A thread that waits long sleeps: on busy cores it would only keep the others from arriving.
    """
    if num_threads == 1:
        return
    word = sync + 8 * _GENERATION
    generation = atomic_load(word)
    if (atomic_add(sync + 8 * _ARRIVED, 1) + 1) % num_threads == 0:
        atomic_add(word, 1)
        if _FUTEX != 0 and atomic_load(sync + 8 * _SLEEPERS) > 0:
            _system_call(_FUTEX, word, _FUTEX_WAKE, num_threads, 0, 0, 0)
        return
    spins = 0
    while atomic_load(word) == generation:
        spins += 1
        if spins < _SPINS_BEFORE_SLEEP:
            _pause()
        elif _FUTEX != 0:
            atomic_add(sync + 8 * _SLEEPERS, 1)
            _system_call(_FUTEX, word, _FUTEX_WAIT, generation, 0, 0, 0)
            atomic_add(sync + 8 * _SLEEPERS, -1)
        else:
            _yield_core()


@kernel
def share(count, thread, num_threads):
    """First and end of this thread's part of ``count`` items."""
    return count * thread // num_threads, count * (thread + 1) // num_threads


class Team:
    """The calling thread and ``num_threads - 1`` helpers, each with its own index.

    A function given to ``run`` must end with ``wait_for_all``: when the caller's call returns, all
    are done.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.sync = np.zeros(SYNC_WORDS, dtype=np.int64)
        self._orders = [queue.SimpleQueue() for _ in range(num_threads - 1)]
        for index, orders in enumerate(self._orders, start=1):
            name = f"daskserve-kernel-{index}"
            given = (orders, index, self.sync)
            threading.Thread(target=_serve, args=given, name=name, daemon=True).start()
        weakref.finalize(self, _dismiss, self._orders)

    def run(self, function: Callable, *arguments: object) -> None:
        """Call ``function(index, *arguments)`` on every thread of the team."""
        for orders in self._orders:
            orders.put((function, arguments))
        function(0, *arguments)


def _serve(orders: queue.SimpleQueue, index: int, sync: np.ndarray) -> None:
    # Keeps the shared words: it may be in the last barrier still when the caller has left it and
    # drops the team, and would write into whatever has their memory then.
    while (order := orders.get()) is not None:
        function, arguments = order
        function(index, *arguments)
        del order, function, arguments  # keep nothing alive while waiting


def _dismiss(all_orders: list[queue.SimpleQueue]) -> None:
    for orders in all_orders:
        orders.put(None)
