"""KV digests where the KV is: the words are summed on the device, the rest is small.

The result is that of `daskserve.workers.kv_digest` bit for bit, whatever the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from daskserve.core.shards import Shard
from daskserve.workers.kv_digest import ODD, digests_of_totals

_CHUNK_BYTES = 2**26  # of KV at a time: its products take as much again


def device_digests(
    pages: torch.Tensor, page_ids: Sequence[int], held: Shard, wanted: Shard
) -> np.ndarray:
    """Digests by layer and KV head, uint64 ``[layers, heads]``; waits for the device.

    Parameters
    ----------
    pages
        ``[blocks + 1, layers, 2, kv_heads, block_size, head_dim]`` of the shard ``held``.
    page_ids
        In token order.
    wanted
        A part of ``held``.
    """
    layers, heads = wanted.within(held)
    words = pages.view(torch.uint8).flatten(4).view(torch.int64)[:, layers, :, heads]
    # 2 * index + 1 times an odd number: signed arithmetic wraps like unsigned.
    odd = torch.tensor(int(np.uint64(ODD).view(np.int64)), device=pages.device)
    weights = torch.arange(1, 2 * words.shape[-1], 2, device=pages.device) * odd
    ids = torch.as_tensor(np.asarray(page_ids, np.int64)).to(pages.device)
    step = max(_CHUNK_BYTES // max(words[0].numel() * 8, 1), 1)
    totals = [
        (words[ids[start : start + step]] * weights).sum(-1) for start in range(0, len(ids), step)
    ]
    together = torch.cat(totals).cpu().numpy().view(np.uint64)
    return digests_of_totals(np.ascontiguousarray(together), wanted.first_layer, wanted.first_head)
