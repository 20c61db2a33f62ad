"""KV between instances of unlike shapes: the layers and heads that one rank needs of another.

A piece is contiguous, ``[pages, layers, 2, heads, block_size, head_dim]``, so that it travels like
whole pages do; only its two ends copy in strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from daskserve.core.kv import Chunks
from daskserve.core.shards import Shard
from daskserve.errors import KVUnavailable
from daskserve.workers.kv_digest import words_digest
from daskserve.workers.kv_pool import KVPool

_CHUNK_BYTES = 2**20  # stays in a core's cache between its copy and the socket


def piece_bytes(pool: KVPool, num_pages: int, shard: Shard) -> int:
    """Bytes of the layers and heads of ``shard`` in so many pages."""
    return num_pages * shard.num_layers * 2 * shard.num_heads * pool.slice_bytes


def read_chunks(pool: KVPool, page_ids: Sequence[int], shard: Shard) -> Chunks:
    """The bytes of `read_piece`, some pages at a time: they travel while others are read."""
    for pages, chunk in _chunks(pool, page_ids, shard):
        _read(pool, pages, shard, chunk)
        yield chunk


def write_chunks(pool: KVPool, page_ids: Sequence[int], shard: Shard) -> Chunks:
    """Room for the bytes of `read_chunks`: what is filled is written when the next is asked for."""
    for pages, chunk in _chunks(pool, page_ids, shard):
        yield chunk
        write_piece(pool, pages, shard, chunk)


def read_piece(pool: KVPool, page_ids: Sequence[int], shard: Shard) -> memoryview:
    """A contiguous copy of the bytes of ``shard``, which is part of the pool's."""
    data = memoryview(bytearray(piece_bytes(pool, len(page_ids), shard)))
    _read(pool, page_ids, shard, data)
    return data


def piece_digest(pool: KVPool, data: memoryview, shard: Shard) -> int:
    """Digest of a piece as it travels; that of the pages that it was read from."""
    shape = (-1, shard.num_layers, 2, shard.num_heads, pool.slice_bytes // 8)
    return words_digest(np.frombuffer(data, dtype=np.uint64).reshape(shape), shard)


def write_piece(pool: KVPool, page_ids: Sequence[int], shard: Shard, data: memoryview) -> None:
    """Put a piece into its place in these pages (KVUnavailable if it is of another size)."""
    expected = piece_bytes(pool, len(page_ids), shard)
    if data.nbytes != expected:
        raise KVUnavailable(f"a piece of KV has {data.nbytes} bytes, {expected} are needed")
    pool.write_slices(page_ids, *shard.within(pool.shard), np.frombuffer(data, dtype=np.uint8))


def _read(pool: KVPool, page_ids: Sequence[int], shard: Shard, out: memoryview) -> None:
    pool.read_slices(page_ids, *shard.within(pool.shard), np.frombuffer(out, dtype=np.uint8))


def _chunks(
    pool: KVPool, page_ids: Sequence[int], shard: Shard
) -> Iterator[tuple[Sequence[int], memoryview]]:
    """Some pages at a time with memory for their bytes, which is the same for all."""
    step = max(_CHUNK_BYTES // piece_bytes(pool, 1, shard), 1)
    room = memoryview(bytearray(piece_bytes(pool, min(step, len(page_ids)), shard)))
    for start in range(0, len(page_ids), step):
        pages = page_ids[start : start + step]
        yield pages, room[: piece_bytes(pool, len(pages), shard)]
