"""Runs the Llama family through the compiled step: the module's weights, none of its Python.

The weights of all layers are stacked, one matrix each for queries-keys-values, output, gate-up and
down; the modules' own parameters become views of the stacks, so that nothing is held twice.
"""

from __future__ import annotations

import torch

from daskserve.workers.forward import ForwardBatch, LayerFacts, ModelShape
from daskserve.workers.kernels import matmul, tables
from daskserve.workers.kernels.cpu import ask_for_huge_pages
from daskserve.workers.kernels.decode import run_step
from daskserve.workers.kernels.team import Team
from daskserve.workers.kernels.vector import LANES
from daskserve.workers.lanes import Lanes
from daskserve.workers.layer_attention import can_attend, product_kind

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
_STATIC_ROTATIONS = ("default", "linear", "llama3", "yarn")


def can_fuse(model: torch.nn.Module, facts: list[LayerFacts]) -> bool:
    """Whether the compiled step computes this model: its family, its sizes and its options."""
    config = model.config
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        return False
    attention = model.model.layers[0].self_attn
    rotary = model.model.rotary_emb
    head_dim = facts[0].head_dim
    element = attention.q_proj.weight.element_size()
    rows = (config.hidden_size, config.num_attention_heads * head_dim, config.intermediate_size)
    return (
        getattr(rotary, "rope_type", "default") in _STATIC_ROTATIONS
        and rotary.inv_freq.numel() * 2 == head_dim
        and all(size * element % matmul.STEP_BYTES == 0 for size in rows)
        and config.hidden_size % matmul.ROWS == 0
        and config.intermediate_size % LANES == 0
        and config.intermediate_size >= matmul.ROWS
        and config.vocab_size >= matmul.ROWS
        and can_attend(facts)
        and all(m.bias is None for n, m in model.named_modules() if n.endswith(_PLAIN_LINEARS))
    )


_PLAIN_LINEARS = ("o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


class FusedDecoder:
    """A model of the Llama family as one compiled function over stacked weights.

    Parameters
    ----------
    model, facts, shape
        A model for which ``can_fuse`` holds. Its parameters become views of the stacks.
    num_threads
        Threads that run a step, the calling one included.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        facts: list[LayerFacts],
        shape: ModelShape,
        num_threads: int,
    ) -> None:
        self.shape = shape
        self.team = Team(num_threads)
        self._kept: list[torch.Tensor] = []  # whatever the addresses point to
        self.decoder = self._describe(model, facts)
        of_few = matmul.compile_product(product_kind(model.dtype), of_few=True)
        self._decoder_of_few = self.decoder._replace(product=of_few)
        self.lanes = Lanes(self.decoder, self.team)

    def _address(self, tensor: torch.Tensor | None) -> int:
        if tensor is None:
            return 0
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _describe(self, model: torch.nn.Module, facts: list[LayerFacts]) -> tables.Decoder:
        config, layers = model.config, model.model.layers
        attention = [layer.self_attn for layer in layers]
        mlp = [layer.mlp for layer in layers]
        dtype = attention[0].q_proj.weight.dtype
        projections = [(a.q_proj, a.k_proj, a.v_proj) for a in attention]
        address = self._address
        product = matmul.compile_product(product_kind(dtype))
        return tables.Decoder(
            product=product,
            attention=product,
            element=dtype.itemsize,
            num_layers=len(layers),
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            inner=config.intermediate_size,
            vocab=config.vocab_size,
            epsilon=config.rms_norm_eps,
            attention_scale=facts[0].scaling,
            rotary_scale=float(model.model.rotary_emb.attention_scaling),
            embedding=address(model.model.embed_tokens.weight.data),
            head=address(model.lm_head.weight.data),
            qkv=address(_stack(projections)),
            output=address(_stack([(a.o_proj,) for a in attention])),
            gate_up=address(_stack([(m.gate_proj, m.up_proj) for m in mlp])),
            down=address(_stack([(m.down_proj,) for m in mlp])),
            first_norm=address(_floats(layer.input_layernorm.weight for layer in layers)),
            second_norm=address(_floats(layer.post_attention_layernorm.weight for layer in layers)),
            final_norm=address(model.model.norm.weight.data.float()),
            qkv_bias=address(_biases(projections)),
            query_norm=address(_head_norms(attention, "q_norm")),
            key_norm=address(_head_norms(attention, "k_norm")),
            frequencies=address(model.model.rotary_emb.inv_freq.float()),
            rotary=address(torch.tensor([int(getattr(a, "use_rope", True)) for a in attention])),
            windows=address(torch.tensor([fact.window or 0 for fact in facts])),
        )

    def forward(self, batch: ForwardBatch, pages: torch.Tensor) -> torch.Tensor:
        """float32 logits ``[R, vocab]``, in a buffer that the next call overwrites."""
        count = batch.num_rows * self.decoder.vocab
        logits = self.lanes.buffers.get("logits", count * 4)
        work, step = self.lanes.lay_out(batch, pages, logits.data_ptr())
        is_few = len(batch.token_ids) <= matmul.FEW_LANES
        decoder = self._decoder_of_few if is_few else self.decoder
        self.team.run(run_step, self.team.num_threads, decoder, work, step)
        return logits[: count * 4].view(torch.float32).view(batch.num_rows, self.decoder.vocab)


def _stack(layers: list[tuple[torch.nn.Linear, ...]]) -> torch.Tensor:
    """One tensor ``[layers, rows, columns]``; the linears' weights become views of it."""
    first = [linear.weight for linear in layers[0]]
    num_rows = sum(weight.shape[0] for weight in first)
    shape = (len(layers), num_rows, first[0].shape[1])
    stack = torch.empty(shape, dtype=first[0].dtype)
    ask_for_huge_pages(stack.data_ptr(), stack.nbytes)
    for layer, linears in enumerate(layers):
        row = 0
        for linear in linears:
            view = stack[layer, row : row + linear.weight.shape[0]]
            view.copy_(linear.weight.data)
            linear.weight.data = view
            row += view.shape[0]
    return stack


def _floats(weights) -> torch.Tensor:
    return torch.stack([weight.data.float() for weight in weights])


def _biases(layers: list[tuple[torch.nn.Linear, ...]]) -> torch.Tensor | None:
    if layers[0][0].bias is None:
        return None
    return _floats(torch.cat([linear.bias for linear in linears]) for linears in layers)


def _head_norms(attention: list[torch.nn.Module], name: str) -> torch.Tensor | None:
    if not hasattr(attention[0], name):
        return None
    return _floats(getattr(a, name).weight for a in attention)
