"""KV block arithmetic and the handle that names a prefilled request's KV."""

from __future__ import annotations

from dataclasses import dataclass, field


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Pages that ``num_tokens`` tokens occupy."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class KVHandle:
    """Names the KV of one prefilled request; small enough to travel as a Dask result.

    Parameters
    ----------
    request_id
        The request that the KV belongs to.
    instance_address
        Dask address of the prefill worker that holds it.
    secret
        Random per prefill: a pull must show it, so that no stale or foreign handle reads KV.
    num_tokens
        Tokens whose KV is held: the whole prompt.
    kv_layout
        Fingerprint of model, dtype, block size and shape; both sides must agree.
    digest
        Digest of the held pages: the decode side checks what it pulled against it.
    tp, pp
        Shape of the prefill instance.
    ranks
        Dask addresses of its ranks, each of which holds some layers and heads; empty if there is
        but one.
    stage_layers
        Layers of each of its stages; empty: as equal as can be.
    """

    request_id: str
    instance_address: str
    secret: bytes = field(repr=False)
    num_tokens: int
    kv_layout: str
    digest: int
    tp: int = field(default=1, compare=False)
    pp: int = field(default=1, compare=False)
    ranks: tuple[str, ...] = field(default=(), compare=False)
    stage_layers: tuple[int, ...] = field(default=(), compare=False)
