"""Which instance a request goes to (DistServe section 4.3): one policy per phase."""

from __future__ import annotations

from collections.abc import Sequence

from daskserve.scheduling.batching import NONE


def shortest_queue(queued_tokens: Sequence[int], queued_requests: Sequence[int]) -> int:
    """Index of the prefill instance with the fewest queued prompt tokens.

    Ties go to fewer requests, then to the lower index. ``NONE`` without instances.
    """
    best = NONE
    for index in range(len(queued_tokens)):
        if best == NONE:
            best = index
            continue
        fewer_tokens = queued_tokens[index] < queued_tokens[best]
        same_tokens = queued_tokens[index] == queued_tokens[best]
        if fewer_tokens or (same_tokens and queued_requests[index] < queued_requests[best]):
            best = index
    return best


def least_loaded(
    used_blocks: Sequence[int],
    total_blocks: Sequence[int],
    running: Sequence[int],
    max_running: Sequence[int],
    need_blocks: int,
) -> int:
    """Index of the least-loaded decode instance that has room for ``need_blocks`` pages.

    Load is the share of KV pages in use, which is what a decode step reads; ties go to fewer
    requests, then to the lower index. ``NONE`` when none has room: the request waits, first
    come first served.
    """
    best = NONE
    for index in range(len(used_blocks)):
        has_slot = running[index] < max_running[index]
        if not has_slot or used_blocks[index] + need_blocks > total_blocks[index]:
            continue
        if best == NONE:
            best = index
            continue
        # Compare used/total without division, so that both sides decide alike to the last bit.
        load = used_blocks[index] * total_blocks[best]
        best_load = used_blocks[best] * total_blocks[index]
        if load < best_load or (load == best_load and running[index] < running[best]):
            best = index
    return best
