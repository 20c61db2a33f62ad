"""KV block arithmetic, the handle that names a prefilled request's KV, and KV on its way."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol


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


@dataclass(frozen=True, slots=True)
class KVFrame:
    """A contiguous piece of KV: bytes on the host, or memory of a device."""

    data: Any


Chunks = Generator[memoryview, None, None]
"""Bytes that are made, or taken, one piece after the other."""


class DeviceFrames(Protocol):
    """KV that may go from device to device without passing through the host."""

    def frames(self) -> Iterator[KVFrame]:
        """The KV in order, as it lies on the device."""

    def fill(self, frame: KVFrame) -> None:
        """Put what has come behind what came before (KVUnavailable)."""


@dataclass(frozen=True, slots=True)
class KVStream:
    """KV that is read, or written, piece by piece: each chunk is good until the next is asked for.

    Close ``chunks`` when they are not used to the end.
    """

    num_bytes: int
    chunks: Chunks
    device: DeviceFrames | None = None
    """Another way to the same KV, where both sides have it on devices."""
