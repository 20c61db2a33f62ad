"""The attention function that every model class calls: it keeps K and V in the paged pool.

transformers calls it once per layer with the packed queries, keys and values of all rows of the
step. It writes the new K and V into their pages, then lets each row attend to its own context:
to the packed K and V where nothing is cached, else to the row's pages. Most models do this in the
kernels; soft-capping, sinks and odd sizes take the torch path below.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from daskserve.errors import ModelError
from daskserve.workers.cuda.step import Asked, DeviceStep
from daskserve.workers.forward import ForwardBatch, LayerFacts
from daskserve.workers.layer_attention import LayerAttention

ATTENTION_NAME = "daskserve_paged"

# Arguments that model classes hand down which do not change the result here.
HARMLESS = frozenset(
    "position_ids use_cache cache_position output_attentions output_hidden_states return_dict"
    " is_causal head_mask output_router_logits num_items_in_batch position_embeddings".split()
)


@dataclass(slots=True)
class PagedStep:
    """What the attention function needs to know of one step; travels as the ``paged`` argument."""

    pages: torch.Tensor
    batch: ForwardBatch
    kernels: LayerAttention | None
    """Begun for this batch; None computes in torch."""
    write_pages: torch.Tensor | None = None
    write_offsets: torch.Tensor | None = None

    @classmethod
    def of(
        cls, pages: torch.Tensor, batch: ForwardBatch, kernels: LayerAttention | None
    ) -> PagedStep:
        """Find the page and the offset of every new token."""
        if kernels is not None:
            kernels.begin(batch, pages)
            return cls(pages, batch, kernels)
        block_size = pages.shape[4]
        positions = torch.from_numpy(batch.positions)
        lengths = torch.from_numpy(batch.query_start).diff()
        rows = torch.repeat_interleave(torch.arange(batch.num_rows), lengths)
        table = torch.from_numpy(batch.page_table)
        write_pages = table[rows, positions // block_size].long()
        return cls(pages, batch, None, write_pages, positions % block_size)


@dataclass(slots=True)
class AttentionRecorder:
    """Stands in for a step, to learn which layers call the function and what they ask of it."""

    layers: dict[int, LayerFacts] = field(default_factory=dict)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedStep | DeviceStep | AttentionRecorder,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attention of packed rows ``[1, heads, T, head_dim]`` over the paged pool."""
    _refuse_unknown(module, attention_mask, others)
    layer = module.layer_idx
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if isinstance(paged, AttentionRecorder):
        is_plain = softcap is None and s_aux is None
        paged.layers[layer] = LayerFacts(
            query.shape[1], key.shape[1], key.shape[3], scaling, sliding_window, is_plain
        )
        return torch.zeros_like(query).transpose(1, 2), None
    if isinstance(paged, DeviceStep):
        asked = Asked(scaling, sliding_window, softcap, s_aux)
        return paged.attend(layer, query[0], key[0], value[0], asked)[None], None
    if paged.kernels is not None:
        return paged.kernels.attend(layer, query[0], key[0], value[0])[None], None
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    layer_pages = paged.pages[:, layer]
    layer_pages[paged.write_pages, 0, :, paged.write_offsets] = keys
    layer_pages[paged.write_pages, 1, :, paged.write_offsets] = values
    output = torch.empty_like(query[0])
    starts = paged.batch.query_start.tolist()
    for row, context in enumerate(paged.batch.context_tokens.tolist()):
        here = slice(starts[row], starts[row + 1])
        if here.stop - here.start == context:
            k, v = key[0, :, here], value[0, :, here]
        else:
            k, v = _cached(layer_pages, paged.batch.page_table[row], context)
        output[:, here] = _attend(query[0, :, here], k, v, scaling, sliding_window, softcap, s_aux)
    return output.transpose(0, 1).unsqueeze(0), None


def _refuse_unknown(module: torch.nn.Module, mask: torch.Tensor | None, others: dict) -> None:
    unknown = [k for k, v in others.items() if v is not None and k not in HARMLESS]
    if mask is not None:
        unknown.append("attention_mask")
    if unknown or not getattr(module, "is_causal", True):
        detail = ", ".join(unknown) or "attention that is not causal"
        raise ModelError(f"{type(module).__name__} asks attention for {detail}: not supported")


def _cached(
    layer_pages: torch.Tensor, page_ids: object, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[kv_heads, context, head_dim]`` of one row, gathered from its pages."""
    block_size = layer_pages.shape[3]
    ids = torch.as_tensor(page_ids)[: -(-context // block_size)].long()
    gathered = layer_pages[ids].permute(1, 2, 0, 3, 4).flatten(2, 3)
    return gathered[0, :, :context], gathered[1, :, :context]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of the last ``query.shape[1]`` positions over ``key.shape[1]`` positions."""
    num_queries, context = query.shape[1], key.shape[1]
    windowed = window is not None and context > window
    if softcap is None and sinks is None and not windowed and num_queries in (1, context):
        return F.scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            is_causal=num_queries > 1,
            scale=scaling,
            enable_gqa=query.shape[0] != key.shape[0],
        )[0]
    groups = query.shape[0] // key.shape[0]
    grouped = query.unflatten(0, (key.shape[0], groups)).flatten(1, 2)
    scores = (grouped @ key.transpose(1, 2)).unflatten(1, (groups, num_queries)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(context - num_queries, context)[:, None]
    other = torch.arange(context)
    visible = other <= at
    if windowed:
        visible &= at - other < window
    scores = scores.float().masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(key.shape[0], groups, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :context].to(query.dtype)
    return (weights.flatten(1, 2) @ value).unflatten(1, (groups, num_queries)).flatten(0, 1)


AttentionInterface.register(ATTENTION_NAME, paged_attention)
