"""One rank's part of the model over its part of the KV: micro-batches in, hidden states out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from daskserve.core.shards import Shard
from daskserve.workers.attention import AttentionRecorder, PagedStep
from daskserve.workers.cuda.step import DeviceStep
from daskserve.workers.forward import ForwardBatch
from daskserve.workers.kv_pool import KVPool, page_bytes
from daskserve.workers.parallel.answers import Answer
from daskserve.workers.parallel.computing import Computing
from daskserve.workers.parallel.group import RankGroup
from daskserve.workers.parallel.micro_batches import MicroBatch, micro_batches

if TYPE_CHECKING:
    from daskserve.workers.parallel.loader import ShardedModel

ROOM = "room tokens"
"""What every rank shares: of how many tokens the KV fits there."""


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
    computing
        With what; where the weights are.
    """

    def __init__(
        self,
        base: torch.nn.Module,
        head: torch.Tensor | None,
        model: ShardedModel,
        group: RankGroup,
        computing: Computing,
    ) -> None:
        self.base, self.head, self.group, self.computing = base, head, group, computing
        self.dtype, self.device = computing.dtype, computing.device
        self.shape = model.shape
        self.shards = model.shards
        self.shard: Shard = model.shards.of_rank(group.rank)
        self.hidden_size: int = model.config.hidden_size

    @torch.inference_mode()
    def learn(self) -> None:
        """Run the layers once, to learn what they ask of attention: all ranks call."""
        recorder = AttentionRecorder()
        with self.computing.active():
            tokens, positions = self.computing.indices([1, 2]), self.computing.indices([0, 1])
            hidden = None
            if not self.group.is_first:
                hidden = torch.zeros(2, self.hidden_size, dtype=self.dtype, device=self.device)
            self._run_layers(tokens, hidden, positions, recorder)
        self.settle()
        layers = [recorder.layers[index] for index in range(self.shard.num_layers)]
        self.computing.learn(layers)

    def new_pool(self, num_blocks: int, block_size: int) -> KVPool:
        """For the KV of the shard."""
        return self.computing.new_pool(self.shape, num_blocks, block_size, self.shard)

    def room_tokens(self, memory_fraction: float) -> int:
        """Of how many tokens the shard's KV fits where this rank computes (ConfigError)."""
        token_bytes = page_bytes(self.shape, self.dtype, 1, self.shard)
        return self.computing.kv_bytes(memory_fraction) // token_bytes

    def bind(self, pages: torch.Tensor) -> None:
        """Use this KV: ``[blocks + 1, layers, 2, kv_heads, block_size, head_dim]`` of the shard."""
        self.computing.bind(pages)

    @torch.inference_mode()
    def run(
        self, batch: ForwardBatch, num_parts: int, asked: Sequence[int]
    ) -> Callable[[], Answer] | None:
        """This rank's share of a step; on the last stage what is returned waits for its answer.

        A card may still be computing it. Other stages go on before the next one has taken what
        they computed.
        """
        group, computing = self.group, self.computing
        with computing.active():
            parts = micro_batches(batch, num_parts)
            arriving = []
            if not group.is_first:
                for tag, part in enumerate(parts):
                    size = (part.batch.num_tokens, self.hidden_size)
                    hidden = torch.empty(size, dtype=self.dtype, device=self.device)
                    arriving.append(group.handed_on(hidden, tag))
            outputs = []
            for tag, part in enumerate(parts):
                hidden = arriving[tag]() if arriving else None
                with computing.timed():
                    output = self._run_part(part, hidden)
                if group.is_last:
                    outputs.append((part, output))
                else:
                    group.hand_on(output, tag)
            if not group.is_last:
                return None
            vocabulary = self.vocabulary_of(group.rank)
            answering = computing.answer(outputs, batch.num_rows, asked, vocabulary)

        def wait() -> Answer:
            group.until(answering.is_done)
            return answering.take()

        return wait

    def settle(self) -> None:
        """Until all that was begun is computed: what copies KV is not in line with it."""
        self.group.until(self.computing.mark().is_reached)

    def vocabulary_of(self, rank: int) -> range:
        """The tokens whose logits a rank of the last stage computes."""
        tp = self.group.parallelism.tp
        return vocabulary_part(self.shape.vocab_size, tp, rank % tp)

    def busy(self) -> torch.Tensor:
        """float64 [1]: seconds spent on micro-batches so far, waits between stages not counted."""
        return torch.tensor([self.computing.busy_s], dtype=torch.float64)

    def _run_part(self, part: MicroBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """Hidden states for the next stage, or float32 logits ``[rows, part of vocabulary]``."""
        inputs = self.computing.inputs(part.batch)
        hidden = self._run_layers(inputs.token_ids, hidden, inputs.positions, inputs.paged)
        if self.head is None:
            return hidden.contiguous()
        return F.linear(hidden[self.computing.indices(part.last_tokens)], self.head).float()

    def _run_layers(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor | None,
        positions: torch.Tensor,
        paged: PagedStep | DeviceStep | AttentionRecorder,
    ) -> torch.Tensor:
        given = (
            {"input_ids": token_ids[None]} if hidden is None else {"inputs_embeds": hidden[None]}
        )
        output = self.base(**given, position_ids=positions[None], use_cache=False, paged=paged)
        return output.last_hidden_state[0]


def vocabulary_part(vocab_size: int, tp: int, tp_rank: int) -> range:
    """The tokens whose logits a rank of the last stage computes."""
    return range(vocab_size * tp_rank // tp, vocab_size * (tp_rank + 1) // tp)
