"""Runs the Llama family through the compiled step: the module's weights, none of its Python.

The weights of all layers are stacked, one matrix each for queries-keys-values, output, gate-up and
down; the modules' own parameters become views of the stacks, so that nothing is held twice.
"""

from __future__ import annotations

import numpy as np
import torch

from daskserve.workers.attention import LayerFacts
from daskserve.workers.forward import ForwardBatch, ModelShape
from daskserve.workers.kernels import matmul, tables
from daskserve.workers.kernels.cpu import has_amx
from daskserve.workers.kernels.decode import run_step
from daskserve.workers.kernels.paged import KEYS_BLOCK
from daskserve.workers.kernels.team import Team
from daskserve.workers.kernels.vector import LANES

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
        and head_dim % 32 == 0
        and all(size * element % matmul.STEP_BYTES == 0 for size in rows)
        and config.hidden_size % matmul.ROWS == 0
        and config.intermediate_size % LANES == 0
        and config.vocab_size >= matmul.ROWS
        and config.num_attention_heads // facts[0].num_kv_heads <= LANES
        and all(fact.is_plain and fact.scaling == facts[0].scaling for fact in facts)
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
        self._kept: list[torch.Tensor | np.ndarray] = []  # whatever the addresses point to
        self.decoder = self._describe(model, facts)
        self._buffers: dict[str, torch.Tensor] = {}
        self._tables = [np.zeros((0, n), dtype=np.int64) for n in (3, 4, 5)]
        self._tiles = matmul.tile_config()

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
        kind = str(dtype).removeprefix("torch.")
        if kind == "bfloat16" and has_amx():
            kind = "tiles"
        projections = [(a.q_proj, a.k_proj, a.v_proj) for a in attention]
        address = self._address
        return tables.Decoder(
            product=matmul.compile_product(kind),
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
        arrays = (
            np.ascontiguousarray(batch.token_ids, dtype=np.int64),
            np.ascontiguousarray(batch.positions, dtype=np.int64),
            np.ascontiguousarray(batch.query_start, dtype=np.int32),
            np.ascontiguousarray(batch.context_tokens, dtype=np.int32),
            np.ascontiguousarray(batch.page_table, dtype=np.int32),
        )
        decoder = self.decoder
        num_rows, num_blocks = batch.num_rows, int(tables.count_lanes(arrays[2]))
        num_lanes = num_blocks * LANES
        sizes = (num_lanes, num_rows, num_lanes * decoder.num_kv_heads)
        for index, size in enumerate(sizes):
            if len(self._tables[index]) < size:
                width = self._tables[index].shape[1]
                self._tables[index] = np.zeros((2 * size, width), dtype=np.int64)
        lanes, rows, items = self._tables
        page_bytes = pages[0].numel() * decoder.element
        num_items, values_bytes = tables.lay_out(
            arrays,
            arrays[4].ctypes.data,
            (pages.data_ptr(), page_bytes, pages.shape[4]),
            (decoder.num_kv_heads, decoder.head_dim * decoder.element),
            lanes[:num_lanes],
            rows,
            items,
        )
        logits = self._buffer("logits", num_rows * decoder.vocab * 4).view(torch.float32)
        longest = int(arrays[3].max()) if values_bytes else 0
        step = tables.Step(
            num_blocks=num_blocks,
            num_rows=num_rows,
            num_items=num_items,
            has_prompts=values_bytes > 0,
            lanes=lanes.ctypes.data,
            rows=rows.ctypes.data,
            items=items.ctypes.data,
            pages=pages.data_ptr(),
            page_bytes=page_bytes,
            block_size=pages.shape[4],
            logits=logits.data_ptr(),
        )
        self.team.run(
            run_step,
            self.team.num_threads,
            decoder,
            self._workspace(num_blocks, values_bytes, longest),
            step,
        )
        return logits[: num_rows * decoder.vocab].view(num_rows, decoder.vocab)

    def _workspace(self, num_blocks: int, values_bytes: int, longest: int) -> tables.Workspace:
        decoder = self.decoder
        lane_bytes = num_blocks * LANES * decoder.element
        group = -(-decoder.num_heads // decoder.num_kv_heads // 4) * 4
        scratch_bytes = max(
            decoder.head_dim * 3 * 64,
            decoder.hidden * 64,
            2 * matmul.ROWS * 64,
            KEYS_BLOCK * (64 + group * 4) + (group + 16) * decoder.head_dim * 4 + 128,
            matmul.ROWS * 64 + (longest + 2 * tables.KEYS_STEP) * 64,
        )
        features = decoder.num_heads * decoder.head_dim
        half_bytes = num_blocks * decoder.head_dim // 2 * 64
        widest = max(decoder.hidden, features)
        return tables.Workspace(
            residual=self._buffer("residual", num_blocks * decoder.hidden * 64).data_ptr(),
            packed=self._buffer("packed", lane_bytes * widest).data_ptr(),
            query=self._buffer("query", lane_bytes * features).data_ptr(),
            attended=self._buffer("attended", lane_bytes * features).data_ptr(),
            inner=self._buffer("inner", lane_bytes * decoder.inner).data_ptr(),
            cosine=self._buffer("cosine", half_bytes).data_ptr(),
            sine=self._buffer("sine", half_bytes).data_ptr(),
            values=self._buffer("values", values_bytes).data_ptr(),
            scratch=self._buffer("scratch", scratch_bytes * self.team.num_threads).data_ptr(),
            scratch_bytes=scratch_bytes,
            tiles=self._tiles.ctypes.data,
            sync=self.team.sync.ctypes.data,
        )

    def _buffer(self, name: str, num_bytes: int) -> torch.Tensor:
        """A zeroed buffer of at least this size, kept from step to step."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = torch.zeros(-(-num_bytes * 5 // 4 // 64) * 64 + 64, dtype=torch.uint8)
            self._buffers[name] = buffer
        return buffer


def _stack(layers: list[tuple[torch.nn.Linear, ...]]) -> torch.Tensor:
    """One tensor ``[layers, rows, columns]``; the linears' weights become views of it."""
    first = [linear.weight for linear in layers[0]]
    num_rows = sum(weight.shape[0] for weight in first)
    shape = (len(layers), num_rows, first[0].shape[1])
    # numpy asks for huge pages, which spares the many rows of a product most address look-ups.
    integers = np.empty(shape, dtype=np.int16 if first[0].element_size() == 2 else np.int32)
    stack = torch.from_numpy(integers).view(first[0].dtype)
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
