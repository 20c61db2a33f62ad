"""One rank's part of the model over its part of the KV: micro-batches in, hidden states out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from daskserve.core.shards import Shard
from daskserve.workers.attention import AttentionRecorder, PagedStep
from daskserve.workers.forward import ForwardBatch, LayerFacts
from daskserve.workers.kernels.cpu import ask_for_huge_pages
from daskserve.workers.kernels.vector import LANES
from daskserve.workers.layer_attention import LayerAttention, can_attend
from daskserve.workers.parallel.group import RankGroup
from daskserve.workers.parallel.micro_batches import MicroBatch, micro_batches

if TYPE_CHECKING:
    from daskserve.workers.parallel.loader import ShardedModel


class Stage:
    """Runs this rank's share of every step; all ranks of the group at once.

    Parameters
    ----------
    base
        Module of the rank's layers; takes token ids on the first stage, hidden states on others.
    head
        Rows of the vocabulary head, last stage only.
    model, group
        What is shared out, and among whom.
    dtype, num_threads
        Of weights and KV; of the matrix products and of attention.
    """

    def __init__(
        self,
        base: torch.nn.Module,
        head: torch.Tensor | None,
        model: ShardedModel,
        group: RankGroup,
        dtype: torch.dtype,
        num_threads: int,
    ) -> None:
        self.base, self.head, self.group, self.dtype = base, head, group, dtype
        self.shape = model.shape
        self.shards = model.shards
        self.shard: Shard = model.shards.of_rank(group.rank)
        self.hidden_size: int = model.config.hidden_size
        self.num_threads = num_threads
        self.pages: torch.Tensor | None = None
        self._busy_s = 0.0
        self._facts: list[LayerFacts] | None = None
        self._compiled: LayerAttention | None = None

    def bind(self, pages: torch.Tensor) -> None:
        """Use this KV: ``[blocks + 1, layers, 2, kv_heads, block_size, head_dim]`` of the shard.

        The first call runs the layers once, to learn what they ask of attention: all ranks call.
        """
        if self._facts is None:
            self._facts = self._discover()
            if can_attend(self._facts):
                self._compiled = LayerAttention(self._facts, self.dtype, self.num_threads)
        ask_for_huge_pages(pages.data_ptr(), pages.nbytes)
        self.pages = pages

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, num_parts: int) -> list[tuple[MicroBatch, torch.Tensor]]:
        """This rank's share of a step; the last stage gets its micro-batches and their logits.

        Logits are float32 ``[rows that end here, this rank's part of the vocabulary]``. Other
        stages go on before the next one has taken what they computed.
        """
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        group = self.group
        parts = micro_batches(batch, num_parts)
        arriving = []
        if not group.is_first:
            for tag, part in enumerate(parts):
                hidden = torch.empty(part.batch.num_tokens, self.hidden_size, dtype=self.dtype)
                arriving.append(group.receive(hidden, group.neighbour(-1), tag))
        answers = []
        for tag, part in enumerate(parts):
            hidden = arriving[tag]() if arriving else None
            started_at = time.perf_counter()
            output = self._run_part(part, hidden)
            self._busy_s += time.perf_counter() - started_at
            if group.is_last:
                answers.append((part, output))
            else:
                group.post(output, group.neighbour(1), tag)
        return answers

    def vocabulary_of(self, rank: int) -> range:
        """The tokens whose logits a rank of the last stage computes."""
        tp = self.group.parallelism.tp
        return vocabulary_part(self.shape.vocab_size, tp, rank % tp)

    def busy(self) -> torch.Tensor:
        """float64 [1]: seconds spent on micro-batches so far, waits between stages not counted."""
        return torch.tensor([self._busy_s], dtype=torch.float64)

    def _run_part(self, part: MicroBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        batch = part.batch
        compiled = self._compiled if self.pages.shape[4] % LANES == 0 else None
        step = PagedStep.of(self.pages, batch, compiled)
        hidden = self._run_layers(
            torch.from_numpy(batch.token_ids), hidden, torch.from_numpy(batch.positions), step
        )
        if self.head is None:
            return hidden.contiguous()
        return F.linear(hidden[torch.from_numpy(part.last_tokens)], self.head).float()

    def _run_layers(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor | None,
        positions: torch.Tensor,
        paged: PagedStep | AttentionRecorder,
    ) -> torch.Tensor:
        given = (
            {"input_ids": token_ids[None]} if hidden is None else {"inputs_embeds": hidden[None]}
        )
        output = self.base(**given, position_ids=positions[None], use_cache=False, paged=paged)
        return output.last_hidden_state[0]

    @torch.inference_mode()
    def _discover(self) -> list[LayerFacts]:
        recorder = AttentionRecorder()
        tokens = torch.tensor([1, 2])
        hidden = None
        if not self.group.is_first:
            hidden = torch.zeros(2, self.hidden_size, dtype=self.dtype)
        self._run_layers(tokens, hidden, torch.arange(2), recorder)
        return [recorder.layers[index] for index in range(self.shard.num_layers)]


def vocabulary_part(vocab_size: int, tp: int, tp_rank: int) -> range:
    """The tokens whose logits a rank of the last stage computes."""
    return range(vocab_size * tp_rank // tp, vocab_size * (tp_rank + 1) // tp)
