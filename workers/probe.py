"""Checks at load that a model computes the same through paged attention as by itself.

A class that does not call the attention function, or asks it for something that it does not
know, would give wrong tokens in silence: it is refused here, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from daskserve.errors import ModelError
from daskserve.workers.attention import ATTENTION_NAME, AttentionRecorder
from daskserve.workers.forward import ForwardBatch, LayerFacts

if TYPE_CHECKING:
    from daskserve.workers.cuda.runner import DeviceRunner
    from daskserve.workers.runner import ModelRunner

# Root mean square difference of logits, relative to their spread, that rounding alone may cause.
# bfloat16 models are that coarse themselves: their own float32 logits are up to 0.15 away.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.4}
PREFILL, DECODE, CHUNK = 7, 1, 4


@torch.inference_mode()
def discover(model: torch.nn.Module) -> list[LayerFacts]:
    """What every layer asks of the attention function, in order.

    Raises
    ------
    ModelError
        A layer does not call it, or the layers' KV differ in shape.
    """
    recorder = AttentionRecorder()
    model(input_ids=torch.tensor([[1, 2]], device=model.device), use_cache=False, paged=recorder)
    num_layers = model.config.get_text_config().num_hidden_layers
    if sorted(recorder.layers) != list(range(num_layers)):
        raise ModelError(
            f"{len(recorder.layers)} of its {num_layers} layers use the attention function"
        )
    facts = [recorder.layers[index] for index in range(num_layers)]
    if len({(fact.num_kv_heads, fact.head_dim) for fact in facts}) != 1:
        raise ModelError("its layers have KV of different shapes")
    return facts


@torch.inference_mode()
def verify(runner: ModelRunner | DeviceRunner, name: str, block_size: int) -> None:
    """Compare a prefill, a decode and a chunked step with one plain forward pass.

    Raises
    ------
    ModelError
        The logits differ by more than rounding explains.
    """
    shape = runner.shape
    total = PREFILL + DECODE + CHUNK
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, total)
    num_pages = -(-total // block_size)
    pages = torch.zeros(
        num_pages + 1,
        shape.num_layers,
        2,
        shape.num_kv_heads,
        block_size,
        shape.head_dim,
        dtype=runner.dtype,
        device=runner.model.device,
    )
    runner.bind(pages)
    plain = _plain_logits(runner.model, tokens)
    start = 0
    for step in (PREFILL, DECODE, CHUNK):
        end = start + step
        batch = ForwardBatch(
            token_ids=tokens[start:end],
            positions=np.arange(start, end),
            query_start=np.array([0, step], dtype=np.int32),
            context_tokens=np.array([end], dtype=np.int32),
            page_table=np.arange(num_pages, 0, -1, dtype=np.int32)[None],
        )
        logits = runner.forward(batch)[0].cpu()
        expected = plain[end - 1]
        error = (logits - expected).square().mean().sqrt() / expected.std()
        if not error <= TOLERANCE[runner.dtype]:
            raise ModelError(
                f"{name} is not computed exactly by paged attention (logits differ by {error:.2g}"
                f" of their spread after {end} tokens); it cannot be served"
            )
        start = end


def _plain_logits(model: torch.nn.Module, tokens: np.ndarray) -> torch.Tensor:
    """Logits of the model's own eager attention over all tokens at once."""
    model.set_attn_implementation("eager")
    try:
        ids = torch.from_numpy(tokens)[None].to(model.device)
        return model(input_ids=ids, use_cache=False).logits[0].float().cpu()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
