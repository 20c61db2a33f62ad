"""What the attention kernels must compute, in plain torch on any device.

``varlen_attn`` has the arguments of ``torch.nn.attention.varlen.varlen_attn``, which runs on CUDA
only: it takes its place where our use of it is checked without a GPU.
"""

from __future__ import annotations

import torch


def attend_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    left: int = -1,
    is_causal: bool = True,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one row's last ``n`` positions over all its ``c`` positions.

    Parameters
    ----------
    query
        ``[n, heads, dim]``.
    key, value
        ``[c, kv_heads, dim]``.
    left
        How many positions before its own a query sees; -1 for all.

    Returns
    -------
    torch.Tensor
        ``[n, heads, dim]``, computed in float32.
    """
    n, heads, dim = query.shape
    c, kv_heads, _ = key.shape
    group = heads // kv_heads
    q = query.float().unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = (q @ key.float().permute(1, 2, 0)).view(kv_heads, group, n, c) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(c - n, c, device=query.device)[:, None]
    other = torch.arange(c, device=query.device)
    visible = (other <= at) if is_causal else torch.ones_like(other <= at)
    if left >= 0:
        visible = visible & (at - other <= left)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, n, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :c].reshape(kv_heads, group * n, c)
    output = (weights @ value.float().transpose(0, 1)).view(kv_heads, group, n, dim)
    return output.permute(2, 0, 1, 3).reshape(n, heads, dim).to(query.dtype)


def paged_row(pages: torch.Tensor, page_ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """``[num_tokens, kv_heads, dim]`` of ``[pages, page_size, kv_heads, dim]``."""
    count = -(-num_tokens // pages.shape[1])
    return pages[page_ids[:count].long()].flatten(0, 1)[:num_tokens]


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attention of packed rows, over packed or paged keys and values; arguments as PyTorch's."""
    _check(query, key, value, cu_seq_q, cu_seq_k, enable_gqa, seqused_k, block_table)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    starts, key_starts = cu_seq_q.tolist(), cu_seq_k.tolist()
    used = key_starts if seqused_k is None else seqused_k.tolist()
    output = torch.empty_like(query)
    for row, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if block_table is None:
            here = slice(key_starts[row], key_starts[row + 1])
            k, v = key[here], value[here]
        else:
            k, v = (paged_row(pages, block_table[row], used[row]) for pages in (key, value))
        if end - start > max_q or len(k) > max_k:
            raise ValueError(f"row {row} is longer than max_q={max_q} or max_k={max_k}")
        output[start:end] = attend_row(
            query[start:end], k, v, scale, window_size[0], is_causal=window_size[1] == 0
        )
    return output


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    enable_gqa: bool,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> None:
    """What the CUDA kernels refuse: their limits but for the size of a page and the type."""
    num_rows = cu_seq_q.numel() - 1
    kv_heads = key.shape[-2]
    if query.shape[1] != kv_heads and not (enable_gqa and query.shape[1] % kv_heads == 0):
        raise ValueError(f"{query.shape[1]} query heads over {kv_heads} KV heads")
    counts = [t for t in (cu_seq_q, cu_seq_k, seqused_k, block_table) if t is not None]
    if any(t.dtype != torch.int32 for t in counts) or cu_seq_k.numel() != num_rows + 1:
        raise ValueError("lengths and tables are int32, cu_seq_k as long as cu_seq_q")
    if any(t.stride(-1) != 1 for t in (query, key, value, *counts)):
        raise ValueError("the last dimension must be contiguous")
    if block_table is not None and (seqused_k is None or block_table.shape[0] != num_rows):
        raise ValueError("a block table needs seqused_k and one line for every row")
