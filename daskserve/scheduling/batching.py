"""Which requests go into the next step of an instance (DistServe section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence

NONE = -1
"""Returned as an index when no choice exists; numba has no cheap optional."""


def prefill_batch_size(
    prompt_tokens: Sequence[int],
    budget_tokens: int,
    free_blocks: int,
    block_size: int,
    max_requests: int,
) -> int:
    """How many requests from the head of the queue to prefill in one step.

    First come first served: fills the step up to ``budget_tokens`` (L_m), lets one longer
    prompt run alone, and never overtakes a head that waits for memory.

    Parameters
    ----------
    prompt_tokens
        Prompt lengths in queue order.
    budget_tokens
        L_m, the length beyond which a longer batch gains no throughput.
    free_blocks, block_size
        Pages left in the pool and tokens per page.
    max_requests
        Most requests in one step.
    """
    taken = 0
    total_tokens = 0
    blocks_left = free_blocks
    for num_tokens in prompt_tokens:
        need = (num_tokens + block_size - 1) // block_size
        fits_budget = taken == 0 or total_tokens + num_tokens <= budget_tokens
        if taken >= max_requests or not fits_budget or need > blocks_left:
            break
        taken += 1
        total_tokens += num_tokens
        blocks_left -= need
    return taken


def decode_admissions(
    need_blocks: Sequence[int],
    free_blocks: int,
    num_running: int,
    max_running: int,
    reserve_blocks: int,
) -> int:
    """How many waiting requests from the head of the queue may join the decode batch.

    First come first served. ``need_blocks`` are the pages for the tokens that a request has
    now plus the next one; ``reserve_blocks`` stay free for the growth of what already runs,
    except when nothing runs: then the head is admitted if it fits at all, so that a small
    pool cannot deadlock.
    """
    admitted = 0
    blocks_left = free_blocks
    for need in need_blocks:
        running = num_running + admitted
        reserve = reserve_blocks if running > 0 else 0
        if running >= max_running or need + reserve > blocks_left:
            break
        admitted += 1
        blocks_left -= need
    return admitted


def preemption_victim(admission_order: Sequence[int]) -> int:
    """Index of the running request to preempt: the one admitted last, so the oldest finish.

    ``NONE`` when at most one runs: a lone request that was accepted always fits.
    """
    if len(admission_order) < 2:
        return NONE
    victim = 0
    for index in range(1, len(admission_order)):
        if admission_order[index] > admission_order[victim]:
            victim = index
    return victim


def chunk_tokens(remaining_prompt_tokens: int, step_budget_tokens: int, num_decoding: int) -> int:
    """Prompt tokens to add to a mixed step that already decodes ``num_decoding`` requests.

    Chunked prefill: decode tokens are counted first, the prompt fills what is left of the
    budget; at least one token, so that a full decode batch cannot starve a prompt.
    """
    left = step_budget_tokens - num_decoding
    if left < 1:
        left = 1
    return min(remaining_prompt_tokens, left)
