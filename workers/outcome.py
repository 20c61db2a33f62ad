"""What an engine says of a request when it is done with it."""

from __future__ import annotations

from daskserve.core.kv import KVHandle
from daskserve.core.request import Completion, FinishReason, Prefilled, Timeline
from daskserve.workers.sequence import Sequence


def completion(sequence: Sequence, reason: FinishReason, text: str, now: float) -> Completion:
    """The answer; ``now`` is when its last token was sampled, on the service clock."""
    return Completion(
        request_id=sequence.request.request_id,
        text=text,
        token_ids=tuple(sequence.output_ids),
        finish_reason=reason,
        num_prompt_tokens=sequence.request.num_prompt_tokens,
        timeline=_timeline(sequence, now),
        logprobs=None if sequence.request.params.logprobs is None else tuple(sequence.logprobs),
    )


def prefilled(
    sequence: Sequence, handle: KVHandle | None = None, answer: Completion | None = None
) -> Prefilled:
    """The result of a prefill: KV that is held, or an answer of one token."""
    return Prefilled(
        request_id=sequence.request.request_id,
        first_token_id=sequence.output_ids[0],
        first_token_at=sequence.first_token_at,
        prefill_queue_s=sequence.prefill_queue_s,
        prefill_s=sequence.prefill_s,
        handle=handle,
        completion=answer,
        first_logprob=sequence.logprobs[0] if sequence.logprobs else None,
    )


def _timeline(sequence: Sequence, now: float) -> Timeline:
    queue_s = decode_s = 0.0
    if sequence.decode_started_at is not None:
        queue_s = sequence.decode_started_at - sequence.first_token_at - sequence.kv_transfer_s
        decode_s = now - sequence.decode_started_at
    return Timeline(
        prefill_queue_s=sequence.prefill_queue_s,
        prefill_s=sequence.prefill_s,
        kv_transfer_s=sequence.kv_transfer_s,
        decode_queue_s=max(queue_s, 0.0),
        decode_s=decode_s,
        num_recomputes=sequence.num_recomputes,
    )
