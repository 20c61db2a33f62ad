"""What an engine refuses, or does not believe, before a request enters its queue."""

from __future__ import annotations

from daskserve.core.instance import Role
from daskserve.errors import ContextOverflow, InvalidParameter, NeverFits
from daskserve.workers.forward import ModelShape
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.sequence import Sequence


def check_fits(sequence: Sequence, role: Role, shape: ModelShape, pool: KVPool) -> None:
    """Refuse what this instance could never finish.

    Raises
    ------
    InvalidParameter
        Token ids outside the vocabulary, or no tokens.
    ContextOverflow
        Longer than the model's context.
    NeverFits
        More KV than the whole pool holds.
    """
    request = sequence.request
    _check_ids("prompt_token_ids", request.prompt_token_ids, shape)
    if sequence.output_ids:
        _check_ids("first_token_id", sequence.output_ids, shape)
    if request.max_total_tokens > shape.context_tokens:
        raise ContextOverflow(
            f"{request.num_prompt_tokens} prompt tokens and max_tokens={request.params.max_tokens}"
            f" exceed the model's context of {shape.context_tokens} tokens"
        )
    needed = request.num_prompt_tokens if role is Role.PREFILL else sequence.max_pool_tokens
    pages = pool.blocks_for(needed)
    if pages > pool.num_blocks:
        raise NeverFits(
            f"the request needs {pages} KV blocks for {needed} tokens, the {role.value} instance"
            f" has {pool.num_blocks} of {pool.block_size} tokens; lower max_tokens, shorten the"
            " prompt or give the instance more kv_memory_bytes"
        )


def _check_ids(field: str, ids: tuple[int, ...] | list[int], shape: ModelShape) -> None:
    if not ids:
        raise InvalidParameter(field, ids, "must not be empty")
    for bad in (min(ids), max(ids)):
        if not 0 <= bad < shape.vocab_size:
            raise InvalidParameter(field, bad, f"must be token ids of 0..{shape.vocab_size - 1}")


def usable_handle(sequence: Sequence, kv_layout: str) -> bool:
    """Whether a handle can be the KV of this request; if not, the prompt is computed here."""
    handle = sequence.handle
    return (
        handle.request_id == sequence.request.request_id
        and handle.num_tokens == sequence.request.num_prompt_tokens
        and handle.kv_layout == kv_layout
    )
