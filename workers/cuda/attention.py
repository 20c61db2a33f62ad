"""Chooses what computes attention on a device: PyTorch's varlen_attn or our Triton kernels.

varlen_attn (FlashAttention) computes prompts straight from the step, and from PyTorch 2.12 on
takes block tables too, in pages of 256 tokens. The Triton kernels take everything else.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from daskserve.workers.cuda import reference
from daskserve.workers.cuda.step import Asked, DeviceStep
from daskserve.workers.forward import LayerFacts

logger = logging.getLogger(__name__)

VARLEN_PAGE_TOKENS = 256
"""FlashAttention reads pages whose size is a multiple of this."""
_VARLEN_TYPES = (torch.bfloat16, torch.float16)
_VARLEN_MOST_DIM = 256

Varlen = Callable[..., torch.Tensor]


class PagedOp(Protocol):
    """Attention of packed queries ``[T, heads, D]``; keys and values packed or paged."""

    name: str

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        step: DeviceStep,
        asked: Asked,
    ) -> torch.Tensor: ...

    def tile_tokens(self, group: int, max_query: int) -> int:
        """New tokens of a row that one program computes."""


@dataclass(frozen=True, slots=True)
class Attention:
    """What computes steps.

    ``fresh_op`` computes those of whole prompts from packed keys and values, ``paged_op`` all
    others from pages; without the first, the second computes all.
    """

    paged_op: PagedOp
    fresh_op: PagedOp | None
    group: int

    def tile_tokens(self, max_query: int) -> int:
        return self.paged_op.tile_tokens(self.group, max_query)

    def __str__(self) -> str:
        if self.fresh_op is None:
            return self.paged_op.name
        return f"{self.paged_op.name}, whole prompts {self.fresh_op.name}"


class VarlenAttention:
    """PyTorch's varlen_attn, or what has its arguments.

    Parameters
    ----------
    function
        ``torch.nn.attention.varlen.varlen_attn`` of this version.
    """

    name = "varlen_attn"

    def __init__(self, function: Varlen) -> None:
        self._function = function
        known = inspect.signature(function).parameters
        self.takes_pages = "block_table" in known
        self.is_usable = "scale" in known and "window_size" in known
        # Older versions share KV heads out among the query heads without being told.
        self._options = {"enable_gqa": True} if "enable_gqa" in known else {}

    def tile_tokens(self, group: int, max_query: int) -> int:
        return max_query  # it makes its own

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        step: DeviceStep,
        asked: Asked,
    ) -> torch.Tensor:
        left = -1 if asked.window is None else asked.window - 1
        window_size = (left, 0)
        if step.max_query == 1 and left < 0:
            window_size = (-1, -1)  # the same for one query, which then shares its tile's heads
        options = self._options | {"scale": asked.scaling, "window_size": window_size}
        start, longest = step.query_start, step.max_query
        if keys.ndim == 3:
            return self._function(query, keys, values, start, start, longest, longest, **options)
        # cu_seq_k says nothing that seqused_k does not, but the kernels ask for one.
        return self._function(
            query,
            keys,
            values,
            start,
            start,
            longest,
            step.max_context,
            **options,
            seqused_k=step.context_tokens,
            block_table=step.page_table,
        )


class PlainAttention:
    """Every kind of attention in plain torch, row by row: right on any device, and slow."""

    name = "plain torch"

    def tile_tokens(self, group: int, max_query: int) -> int:
        return max_query

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        step: DeviceStep,
        asked: Asked,
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        starts = step.query_start.tolist()
        left = -1 if asked.window is None else asked.window - 1
        for row, context in enumerate(step.context_tokens.tolist()):
            here = slice(starts[row], starts[row + 1])
            table = step.page_table[row]
            k, v = (reference.paged_row(pages, table, context) for pages in (keys, values))
            output[here] = reference.attend_row(
                query[here],
                k,
                v,
                asked.scaling,
                left,
                softcap=asked.softcap,
                sinks=asked.sinks,
            )
        return output


def choose_attention(
    facts: Sequence[LayerFacts],
    dtype: torch.dtype,
    page_size: int,
    device: torch.device,
    varlen: VarlenAttention | None = None,
) -> Attention:
    """The fastest attention that does what these layers ask.

    Parameters
    ----------
    facts
        Of all layers.
    dtype, page_size
        Of the KV pool.
    device
        Where it lies.
    varlen
        What to use as varlen_attn; None: PyTorch's own.
    """
    group = facts[0].num_heads // facts[0].num_kv_heads
    varlen = varlen or own_varlen()
    can_varlen = varlen is not None and varlen_takes(facts, dtype, device)
    in_pages = can_varlen and varlen.takes_pages and page_size % VARLEN_PAGE_TOKENS == 0
    if can_varlen and device.type == "cuda" and not _works_here(varlen, dtype, device, in_pages):
        can_varlen = in_pages = False
    if in_pages:
        return Attention(varlen, varlen, group)
    return Attention(_general(device), varlen if can_varlen else None, group)


def varlen_takes(facts: Sequence[LayerFacts], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether FlashAttention computes these layers; on the CPU its stand-in takes any type."""
    dim = facts[0].head_dim
    return (
        all(fact.is_plain for fact in facts)
        and dim % 8 == 0
        and dim <= _VARLEN_MOST_DIM
        and (dtype in _VARLEN_TYPES or device.type == "cpu")
    )


def _works_here(
    varlen: VarlenAttention, dtype: torch.dtype, device: torch.device, in_pages: bool
) -> bool:
    """It changes from version to version and may be replaced: what is installed is tried."""
    from daskserve.workers.cuda.self_check import can_be_trusted

    try:
        if can_be_trusted(varlen, dtype, device, in_pages):
            return True
        logger.warning("PyTorch's varlen_attn is not exact here and not used")
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        logger.warning("PyTorch's varlen_attn does not run here and is not used: %s", error)
    return False


def own_varlen() -> VarlenAttention | None:
    """PyTorch's varlen_attn, where this version has one that takes a scale and a window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    found = VarlenAttention(varlen_attn)
    return found if found.is_usable else None


def _general(device: torch.device) -> PagedOp:
    if importlib.util.find_spec("triton") is None:
        logger.warning("Triton is not installed: attention is slow; pip install triton")
        return PlainAttention()
    if device.type != "cuda":
        return PlainAttention()
    from daskserve.workers.cuda.triton_attention import TritonAttention

    return TritonAttention(torch.cuda.get_device_properties(device).multi_processor_count)
