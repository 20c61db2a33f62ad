"""64-bit digests of a request's KV, so that a wrong pull is seen instead of believed.

Every layer and KV head has a digest of its own, and those of several add up modulo 2**64: the sum
over all ranks is the same whatever the shape of the instance, and a slice that goes from one rank
to another can be checked by itself. It is a check against freed, reused, swapped or damaged pages,
not against an adversary: the secret of the handle guards access.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numba
import numpy as np

from daskserve.core.shards import Shard

if TYPE_CHECKING:
    from daskserve.workers.kv_pool import KVPool

ODD = np.uint64(0x9E3779B97F4A7C15)
"""Words are weighted with odd multiples of it."""
_MIX = np.uint64(0xFF51AFD7ED558CCD)


def kv_digest(pool: KVPool, page_ids: Sequence[int]) -> int:
    """Digest of all that ``pool`` holds of the pages, in token order.

    A change inside one page (a flipped bit, a lost piece) always changes it; pages, layers or
    heads swapped or taken from elsewhere leave it unchanged with a chance of 2**-64.
    """
    return summed(pool.slice_digests(page_ids))


def slice_digests(pool: KVPool, page_ids: Sequence[int], shard: Shard | None = None) -> np.ndarray:
    """Digests of the pages by layer and KV head, uint64 ``[layers, heads]`` of the pool's shard.

    Parameters
    ----------
    page_ids
        The request's pages in token order.
    shard
        A part of the pool's shard; None is all of it.
    """
    return pool.slice_digests(page_ids, shard)


def host_digests(
    slices: np.ndarray, page_ids: Sequence[int], held: Shard, wanted: Shard
) -> np.ndarray:
    """`slice_digests` of pages on the host: uint64 ``[pages, layers, 2, heads, words]``."""
    layers, heads = wanted.within(held)
    ids = np.asarray(page_ids, dtype=np.int64)
    bounds = np.array([layers.start, layers.stop, heads.start, heads.stop])
    return _digests(slices, ids, bounds, held.first_layer, held.first_head)


def words_digest(words: np.ndarray, shard: Shard) -> int:
    """Digest of uint64 ``[pages, layers, 2, heads, words]`` that are this part of the model."""
    ids = np.arange(len(words), dtype=np.int64)
    bounds = np.array([0, shard.num_layers, 0, shard.num_heads])
    return summed(_digests(words, ids, bounds, shard.first_layer, shard.first_head))


def summed(digests: np.ndarray) -> int:
    """Digest of several layers and heads together."""
    return int(digests.sum(dtype=np.uint64))


def digests_of_totals(totals: np.ndarray, first_layer: int, first_head: int) -> np.ndarray:
    """Digests from what the words of each page add up to, wherever that was computed.

    Parameters
    ----------
    totals
        uint64 ``[pages, layers, 2, heads]``: the sum of ``word[i] * (2 * i + 1) * ODD``.
    first_layer, first_head
        Their place in the model.
    """
    # A page of one word whose weight is ODD gives the same total.
    inverse = np.uint64(pow(int(ODD), -1, 2**64))
    words = (totals * inverse)[..., None]
    ids = np.arange(len(words), dtype=np.int64)
    bounds = np.array([0, totals.shape[1], 0, totals.shape[3]])
    return _digests(np.ascontiguousarray(words), ids, bounds, first_layer, first_head)


@numba.njit(
    "uint64[:, ::1](uint64[:, :, :, :, ::1], int64[::1], int64[::1], int64, int64)",
    nogil=True,
    cache=True,
)
def _digests(slices, page_ids, bounds, first_layer, first_head):
    """``bounds``: layers and heads of the pool to look at; ``first_*``: their place in the model.

    The loops follow the memory.
    """
    begin_layer, end_layer, begin_head, end_head = bounds
    num_words = slices.shape[4]
    digests = np.empty((end_layer - begin_layer, end_head - begin_head), dtype=np.uint64)
    for layer in range(begin_layer, end_layer):
        for head in range(begin_head, end_head):
            # Two heads that changed places are noticed.
            place = np.uint64(first_layer + layer) << np.uint64(32) | np.uint64(first_head + head)
            start = (np.uint64(len(page_ids)) + place * _MIX) * ODD
            digests[layer - begin_layer, head - begin_head] = start
    for page in page_ids:
        for layer in range(begin_layer, end_layer):
            for part in range(2):
                for head in range(begin_head, end_head):
                    row = slices[page, layer, part, head]
                    # Odd weights are invertible modulo 2**64, so one changed word always changes
                    # the sum.
                    total = np.uint64(0)
                    for index in range(num_words):
                        total += row[index] * (np.uint64(2 * index + 1) * ODD)
                    # Each step is a bijection of the digest, and not linear: order counts.
                    digest = (digests[layer - begin_layer, head - begin_head] ^ total) * _MIX
                    digest ^= digest >> np.uint64(32)
                    digest *= ODD
                    digest ^= digest >> np.uint64(29)
                    digests[layer - begin_layer, head - begin_head] = digest
    return digests
