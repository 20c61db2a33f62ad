"""A 64-bit digest of a request's KV pages, so that a wrong pull is seen instead of believed.

It is a check against freed, reused, swapped or damaged pages, not against an adversary: the
secret of the handle guards access.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xFF51AFD7ED558CCD)


def kv_digest(words: np.ndarray, page_ids: Sequence[int]) -> int:
    """Digest of the pages in order.

    A change inside one page (a flipped bit, a lost piece) always changes it; pages swapped or
    taken from elsewhere leave it unchanged with a chance of 2**-64.

    Parameters
    ----------
    words
        uint64 ``[num_pages, words_per_page]``, see `KVPool.words`.
    page_ids
        The request's pages in token order.
    """
    return int(_digest(words, np.asarray(page_ids, dtype=np.int64)))


@numba.njit("uint64(uint64[:, ::1], int64[::1])", nogil=True, cache=True)
def _digest(words, page_ids):
    digest = np.uint64(len(page_ids))
    for page in page_ids:
        row = words[page]
        # Odd weights are invertible modulo 2**64, so one changed word always changes the sum.
        total = np.uint64(0)
        for index in range(row.shape[0]):
            total += row[index] * (np.uint64(2 * index + 1) * _ODD)
        # Each step is a bijection of the digest, and not linear: the order of pages counts.
        digest = (digest ^ total) * _MIX
        digest ^= digest >> np.uint64(32)
        digest *= _ODD
        digest ^= digest >> np.uint64(29)
    return digest
