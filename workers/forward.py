"""One engine step as the model sees it: packed tokens of several requests, and their KV pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from daskserve.core.instance import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_BUDGET_TOKENS,
    HOST_KV_BYTES,
    EngineConfig,
    Role,
)
from daskserve.core.shards import Shard
from daskserve.workers.scores import Scores

if TYPE_CHECKING:
    from daskserve.workers.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that the engine and its KV pool need."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    eos_token_ids: frozenset[int]

    @property
    def whole(self) -> Shard:
        """All layers and KV heads."""
        return Shard(0, self.num_layers, 0, self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What one layer asks of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    window: int | None
    is_plain: bool
    """Whether a softmax over the causal window is all there is: no soft-capping, no sinks."""


@dataclass(slots=True)
class ForwardBatch:
    """New tokens of R requests, packed one after the other, with the KV pages of each request.

    Parameters
    ----------
    token_ids, positions
        int64 [T]: the new tokens and their positions in their requests.
    query_start
        int32 [R + 1]: row r owns the packed tokens ``query_start[r]:query_start[r + 1]``.
    context_tokens
        int32 [R]: tokens of the row in the KV pool after this step, cached and new.
    page_table
        int32 [R, max_pages]: page ids of each row in order; unused entries are 0, the scratch page.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    query_start: np.ndarray
    context_tokens: np.ndarray
    page_table: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.context_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether every row brings exactly one token."""
        return len(self.token_ids) == len(self.context_tokens)


class Runner(Protocol):
    """Runs a model over packed batches; the real one and the mock look the same to the engine."""

    shape: ModelShape
    dtype: torch.dtype
    shard: Shard
    """What of the KV is in the bound pool; less than ``shape.whole`` where other ranks help."""
    bubble_share: float
    """Of the steps' time so far, how much pipeline stages waited for each other; 0 for one."""
    page_tokens: int
    """Tokens of a page where the configuration does not say."""
    budget_tokens: int
    """L_m where neither the configuration nor a profile says it."""

    max_open: int
    """Most steps that may be begun before the first of them is finished."""

    def new_pool(self, num_blocks: int, block_size: int) -> KVPool:
        """A pool of the shard's KV with so many pages of so many tokens."""

    def bind(self, pool_pages: torch.Tensor) -> None:
        """Use this pool: the shard's ``[blocks + 1, layers, 2, heads, block_size, head_dim]``."""

    def begin(self, batch: ForwardBatch, asked: Sequence[int]) -> Callable[[], Scores]:
        """Start a step; what is returned waits for it, and is called once, in the same order.

        ``asked`` are rows whose logits are wanted too. Whatever is begun later finds the new
        tokens' KV written.
        """

    def default_kv_bytes(self, config: EngineConfig) -> int:
        """Memory for KV where the configuration does not say how much (ConfigError)."""

    def prepare(self, role: Role) -> None:
        """Get ready for the steps of this role; the pool is bound."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 logits ``[R, vocab]`` of each row's last token; writes the new tokens' KV.

        They may be on a device.
        """


class HostRunner:
    """What runners have in common, as it is for those that compute on the CPU."""

    bubble_share = 0.0
    max_open = 1
    page_tokens = DEFAULT_BLOCK_SIZE
    budget_tokens = DEFAULT_BUDGET_TOKENS
    is_on_host = True
    """False where an instance of several ranks computes on cards."""

    def default_kv_bytes(self, config: EngineConfig) -> int:
        return HOST_KV_BYTES

    def prepare(self, role: Role) -> None:
        """Nothing to do."""
