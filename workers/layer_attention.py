"""Compiled attention for models that otherwise run as torch modules."""

from __future__ import annotations

import torch

from daskserve.workers.forward import ForwardBatch, LayerFacts
from daskserve.workers.kernels import matmul, tables
from daskserve.workers.kernels.cpu import HAS_AVX512_BF16, has_amx
from daskserve.workers.kernels.exchange import Packed, attend_layer
from daskserve.workers.kernels.team import Team
from daskserve.workers.kernels.vector import LANES
from daskserve.workers.lanes import Lanes


def can_attend(facts: list[LayerFacts]) -> bool:
    """Whether the kernels compute this attention; the torch path computes every kind."""
    first = facts[0]
    return (
        first.head_dim % matmul.ROWS == 0
        and first.num_heads // first.num_kv_heads <= LANES
        and all(fact.is_plain and fact.scaling == first.scaling for fact in facts)
    )


def product_kind(dtype: torch.dtype) -> str:
    """The fastest matrix product for weights or KV of this type on this CPU."""
    if dtype == torch.bfloat16 and has_amx():
        return "tiles"
    if dtype == torch.bfloat16 and HAS_AVX512_BF16:
        return "pairs"
    return str(dtype).removeprefix("torch.")


class LayerAttention:
    """Attention of one model's layers over a paged pool.

    Parameters
    ----------
    facts
        What the layers ask for; ``can_attend`` holds.
    dtype
        Type of queries, keys, values and pool.
    num_threads
        Threads that share the work, the calling one included.
    """

    def __init__(self, facts: list[LayerFacts], dtype: torch.dtype, num_threads: int) -> None:
        windows = torch.tensor([fact.window or 0 for fact in facts])
        self._windows = windows  # the kernels read it through its address
        product = matmul.compile_product(product_kind(dtype))
        absent = dict.fromkeys(tables.Decoder._fields, 0)
        self.decoder = tables.Decoder(
            **absent
            | dict(
                product=product,
                attention=product,
                element=dtype.itemsize,
                num_layers=len(facts),
                num_heads=facts[0].num_heads,
                num_kv_heads=facts[0].num_kv_heads,
                head_dim=facts[0].head_dim,
                epsilon=0.0,
                attention_scale=facts[0].scaling,
                rotary_scale=1.0,
                windows=windows.data_ptr(),
            )
        )
        self.team = Team(num_threads)
        self.lanes = Lanes(self.decoder, self.team)
        self._work: tables.Workspace | None = None
        self._step: tables.Step | None = None

    def begin(self, batch: ForwardBatch, pages: torch.Tensor) -> None:
        """Lay the batch out; holds for all layers of the step."""
        self._work, self._step = self.lanes.lay_out(batch, pages)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Output ``[T, heads, D]`` for ``[heads, T, D]`` inputs whose K and V it also stores."""
        inputs = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)]
        output = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        strides = []
        for tensor in inputs:
            per_head, per_token, _ = (n * tensor.element_size() for n in tensor.stride())
            strides += [tensor.data_ptr(), per_token, per_head]
        packed = Packed(*strides, output.data_ptr())
        self.team.run(
            attend_layer,
            self.team.num_threads,
            self.decoder,
            self._work,
            self._step,
            layer,
            packed,
        )
        return output
