"""Runs a loaded model over packed batches and returns the logits of each row's last token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from daskserve.errors import ModelError
from daskserve.workers.attention import PagedStep
from daskserve.workers.forward import ForwardBatch, HostRunner, ModelShape, Runner
from daskserve.workers.fused import FusedDecoder
from daskserve.workers.kernels.cpu import ask_for_huge_pages
from daskserve.workers.kernels.vector import LANES
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.layer_attention import LayerAttention
from daskserve.workers.scores import Scores

__all__ = ["ForwardBatch", "ModelRunner", "ModelShape", "Runner"]


class ModelRunner(HostRunner):
    """A transformers model bound to one KV pool.

    Parameters
    ----------
    model
        A causal language model whose attention is ``daskserve.workers.attention``.
    shape, dtype
        Sizes of the model and the type of its weights and KV.
    num_threads
        Threads of the matrix products; set on whichever thread calls ``forward``.
    compiled
        The compiled step or attention, for models that have one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        shape: ModelShape,
        dtype: torch.dtype,
        num_threads: int,
        compiled: FusedDecoder | LayerAttention | None = None,
    ) -> None:
        self.model = model
        self.shape = shape
        self.shard = shape.whole
        self.dtype = dtype
        self.num_threads = num_threads
        self.compiled = compiled
        self.pages: torch.Tensor | None = None

    def new_pool(self, num_blocks: int, block_size: int) -> KVPool:
        return KVPool(self.shape, self.dtype, num_blocks, block_size)

    def bind(self, pool_pages: torch.Tensor) -> None:
        """Use this pool: ``[blocks + 1, layers, 2, kv_heads, block_size, head_dim]``."""
        shape = self.shape
        expected = (shape.num_layers, 2, shape.num_kv_heads, pool_pages.shape[4], shape.head_dim)
        if tuple(pool_pages.shape[1:]) != expected or pool_pages.dtype != self.dtype:
            raise ModelError(
                f"KV pool {tuple(pool_pages.shape)} {pool_pages.dtype} does not fit the model:"
                f" [blocks + 1, {', '.join(map(str, expected))}] {self.dtype} is needed"
            )
        ask_for_huge_pages(pool_pages.data_ptr(), pool_pages.nbytes)
        self.pages = pool_pages

    def begin(self, batch: ForwardBatch, asked: Sequence[int]) -> Callable[[], Scores]:
        scores = Scores.of(self.forward(batch))
        return lambda: scores

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 logits ``[R, vocab]`` of each row's last token; writes the new tokens' KV."""
        compiled = self.compiled if self.pages.shape[4] % LANES == 0 else None
        if isinstance(compiled, FusedDecoder):
            return compiled.forward(batch, self.pages)
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        return self._forward_modules(PagedStep.of(self.pages, batch, compiled))

    def _forward_modules(self, step: PagedStep) -> torch.Tensor:
        batch = step.batch
        last = torch.from_numpy(batch.query_start[1:]).long() - 1
        output = self.model(
            input_ids=torch.from_numpy(batch.token_ids)[None],
            position_ids=torch.from_numpy(batch.positions)[None],
            use_cache=False,
            logits_to_keep=last,
            paged=step,
        )
        return output.logits[0].float()
