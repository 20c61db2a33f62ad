"""One clock for all processes: the scheduler's monotonic clock, and our distance from it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

_NUM_PROBES = 5


async def clock_offset_s(read_remote: Callable[[], Awaitable[float]]) -> float:
    """Seconds to add to ``time.monotonic()`` to get the remote clock.

    The probe with the shortest round trip decides (Cristian's algorithm). Processes of one host
    share the clock: an offset within the error of the measurement is taken for zero.

    Parameters
    ----------
    read_remote
        Asks the other side for its ``time.monotonic()``.
    """
    best: tuple[float, float] | None = None
    for _ in range(_NUM_PROBES):
        asked_at = time.monotonic()
        remote = await read_remote()
        round_trip_s = time.monotonic() - asked_at
        offset_s = remote - (asked_at + round_trip_s / 2)
        if best is None or round_trip_s < best[0]:
            best = (round_trip_s, offset_s)
    round_trip_s, offset_s = best
    return offset_s if abs(offset_s) > round_trip_s / 2 else 0.0
