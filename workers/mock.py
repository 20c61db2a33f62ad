"""The mock model: fixed step times and deterministic tokens, for load tests without weights.

It is the real engine with a runner that computes nothing but keeps honest books: every token's
id and position is written into its KV pages, and the next token is derived from all pages of
the request. A page that is wrong, stale or lost on the way therefore changes the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from daskserve.core.instance import EngineConfig
from daskserve.text.tokenizer import Tokenizer
from daskserve.workers.forward import ForwardBatch, HostRunner, ModelShape
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.scores import Scores

_SLOT_BYTES = 8  # one int64 in the key slot of a token, one in its value slot


class MockRunner(HostRunner):
    """Answers in lower-case letters and never ends by itself: ``max_tokens`` decides.

    Parameters
    ----------
    config
        ``mock_prefill_s`` and ``mock_decode_s`` are the times of a step with and without prompt
        tokens; the thread sleeps, so other threads run on.
    tokenizer
        Gives the vocabulary and the context length.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self.dtype = getattr(torch, config.dtype)
        self.shape = ModelShape(
            num_layers=1,
            num_kv_heads=1,
            head_dim=_SLOT_BYTES // self.dtype.itemsize,
            vocab_size=tokenizer.vocab_size,
            context_tokens=tokenizer.context_tokens,
            eos_token_ids=tokenizer.eos_token_ids,
        )
        self.shard = self.shape.whole
        self._step_s = {False: config.mock_prefill_s, True: config.mock_decode_s}
        self._letters = [
            i for letter in "abcdefghijklmnopqrstuvwxyz" for i in tokenizer.encode(letter)
        ]
        rng = np.random.default_rng(0)
        self._weights = rng.integers(1, 2**62, (2, self.shape.context_tokens), np.int64) | 1
        self._noise = rng.standard_normal(len(self._letters)).astype(np.float32)
        self._slots: np.ndarray | None = None

    def new_pool(self, num_blocks: int, block_size: int) -> KVPool:
        return KVPool(self.shape, self.dtype, num_blocks, block_size)

    def bind(self, pool_pages: torch.Tensor) -> None:
        raw = pool_pages.view(torch.uint8).numpy()
        blocks, block_size = pool_pages.shape[0], pool_pages.shape[4]
        self._slots = raw.reshape(blocks, -1).view(np.int64).reshape(blocks, 2, block_size)

    def begin(self, batch: ForwardBatch, asked: Sequence[int]) -> Callable[[], Scores]:
        scores = Scores.of(self.forward(batch))
        return lambda: scores

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        started_at = time.perf_counter()
        logits = np.full((batch.num_rows, self.shape.vocab_size), -np.inf, np.float32)
        for row in range(batch.num_rows):
            state = self._advance(batch, row)
            logits[row, self._letters] = np.roll(self._noise, state % len(self._letters))
        left_s = self._step_s[batch.is_decode] - (time.perf_counter() - started_at)
        if left_s > 0:
            time.sleep(left_s)
        return torch.from_numpy(logits)

    def _advance(self, batch: ForwardBatch, row: int) -> int:
        """Write the row's new tokens; a number that every token in its pages decides."""
        block_size = self._slots.shape[2]
        start, end = batch.query_start[row], batch.query_start[row + 1]
        positions = batch.positions[start:end]
        pages = batch.page_table[row]
        page, slot = pages[positions // block_size], positions % block_size
        self._slots[page, 0, slot] = batch.token_ids[start:end] + 1
        self._slots[page, 1, slot] = positions + 1
        context = batch.context_tokens[row]
        held = self._slots[pages[: -(-context // block_size)]].transpose(1, 0, 2).reshape(2, -1)
        mixed = int((held[:, :context] * self._weights[:, :context]).sum())
        return (mixed ^ (mixed >> 31)) & 0x7FFFFFFF
