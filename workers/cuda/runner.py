"""Runs a model on a device: inputs go there in one copy, logits stay there until they are chosen
from, and decode steps are replayed from graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from daskserve.core.instance import DEFAULT_BLOCK_SIZE, HOST_KV_BYTES, EngineConfig, Role
from daskserve.errors import ModelError
from daskserve.workers.cuda.attention import (
    VARLEN_PAGE_TOKENS,
    Attention,
    VarlenAttention,
    choose_attention,
)
from daskserve.workers.cuda.device import free_kv_bytes
from daskserve.workers.cuda.graphs import DecodeGraphs
from daskserve.workers.cuda.pool import DevicePool
from daskserve.workers.cuda.staging import start_fetch
from daskserve.workers.cuda.step import DeviceStep, to_device
from daskserve.workers.forward import ForwardBatch, LayerFacts, ModelShape
from daskserve.workers.scores import Scores

logger = logging.getLogger(__name__)


class DeviceRunner:
    """A transformers model on a device, bound to one KV pool. One thread only.

    Parameters
    ----------
    model
        A causal language model whose attention is ``daskserve.workers.attention``, on the device.
    facts, shape, dtype
        What its layers ask of attention; its sizes; the type of its weights and KV.
    device
        ``cuda``, or ``cpu`` to check everything but the kernels without a GPU.
    max_rows
        Longest decode batch.
    varlen
        What computes as PyTorch's ``varlen_attn``; None: PyTorch.
    """

    bubble_share = 0.0
    max_open = 1
    # Weights are read once a step: below this many tokens a GPU waits for them.
    budget_tokens = 2048

    def __init__(
        self,
        model: torch.nn.Module,
        facts: list[LayerFacts],
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        varlen: VarlenAttention | None = None,
    ) -> None:
        self.model = model
        self.shape = shape
        self.shard = shape.whole
        self.dtype = dtype
        self.device = device
        self.facts = facts
        self._max_rows = max_rows
        self._varlen = varlen
        # Not the default stream: UCXX waits for that one before it sends or receives.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pages: torch.Tensor | None = None
        self._attention: Attention | None = None
        self._graphs: DecodeGraphs | None = None

    @property
    def attention(self) -> Attention:
        """What computes attention over the bound pool."""
        if self._attention is None:
            raise ModelError("no KV pool is bound")
        return self._attention

    @property
    def page_tokens(self) -> int:
        """The page size with which PyTorch's attention reads pages, where it does."""
        largest = choose_attention(
            self.facts, self.dtype, VARLEN_PAGE_TOKENS, self.device, self._varlen
        )
        has_pages = isinstance(largest.paged_op, VarlenAttention)
        return VARLEN_PAGE_TOKENS if has_pages else DEFAULT_BLOCK_SIZE

    def default_kv_bytes(self, config: EngineConfig) -> int:
        """What the card has left (ConfigError)."""
        if self.device.type != "cuda":
            return HOST_KV_BYTES
        return free_kv_bytes(self.device, config.gpu_memory_fraction)

    @property
    def num_graphs(self) -> int:
        """Batch sizes that are replayed from a graph."""
        return 0 if self._graphs is None else len(self._graphs)

    def new_pool(self, num_blocks: int, block_size: int) -> DevicePool:
        return DevicePool(self.shape, self.dtype, num_blocks, block_size, self.device)

    def bind(self, pool_pages: torch.Tensor) -> None:
        """Use this pool: ``[blocks + 1, layers, 2, kv_heads, block_size, head_dim]``."""
        shape = self.shape
        expected = (shape.num_layers, 2, shape.num_kv_heads, pool_pages.shape[4], shape.head_dim)
        if tuple(pool_pages.shape[1:]) != expected or pool_pages.dtype != self.dtype:
            raise ModelError(
                f"KV pool {tuple(pool_pages.shape)} {pool_pages.dtype} does not fit the model:"
                f" [blocks + 1, {', '.join(map(str, expected))}] {self.dtype} is needed"
            )
        self._pages = pool_pages
        self._attention = choose_attention(
            self.facts, self.dtype, pool_pages.shape[4], self.device, self._varlen
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the pool was made on another stream
            self._graphs = DecodeGraphs(
                self._run, self._attention, pool_pages, self._max_rows, shape.context_tokens
            )

    @torch.inference_mode()
    def prepare(self, role: Role) -> None:
        """Record the graphs of decode steps, so that no request waits for them."""
        if self._graphs is not None and role is not Role.PREFILL:
            self._use_stream()
            self._graphs.record_all()
            logger.info("attention: %s; decode graphs: %d", self.attention, len(self._graphs))

    @torch.inference_mode()
    def begin(self, batch: ForwardBatch, asked: Sequence[int]) -> Callable[[], Scores]:
        """Start a step; what is returned waits for it."""
        logits = self.forward(batch)
        best, tokens = logits.max(dim=1)
        wanted = logits[torch.as_tensor(list(asked), dtype=torch.long).to(self.device)]
        copies = start_fetch(tokens, best, wanted)

        def finish() -> Scores:
            tokens, best, wanted = (copy.numpy() for copy in copies())
            return Scores(tokens, best, dict(zip(asked, wanted, strict=True)))

        return finish

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 logits ``[R, vocab]`` of each row's last token, on the device.

        Nobody waits for them here, and the next call may overwrite them.
        """
        self._use_stream()
        if self._graphs is not None and batch.is_decode:
            logits = self._graphs.replay(batch)
            if logits is not None:
                return logits
        return self._run(to_device(batch, self._pages, self.attention, self.device))

    def _use_stream(self) -> None:
        if self._stream is not None and torch.cuda.current_stream(self.device) != self._stream:
            torch.cuda.set_stream(self._stream)

    def _run(self, step: DeviceStep) -> torch.Tensor:
        output = self.model(
            input_ids=step.token_ids[None],
            position_ids=step.positions[None],
            use_cache=False,
            logits_to_keep=0 if step.last_tokens is None else step.last_tokens,
            paged=step,
        )
        return output.logits[0].float()
