"""From a model directory to a runner that is known to compute what the plain model computes."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging as transformers_logging

from daskserve.core.instance import EngineConfig
from daskserve.errors import ModelError
from daskserve.models.engine_packages import TRANSFORMERS_LOCK
from daskserve.workers.attention import ATTENTION_NAME
from daskserve.workers.cuda.attention import VarlenAttention
from daskserve.workers.cuda.device import resolve_device
from daskserve.workers.cuda.runner import DeviceRunner
from daskserve.workers.forward import LayerFacts, ModelShape
from daskserve.workers.fused import FusedDecoder, can_fuse
from daskserve.workers.layer_attention import LayerAttention, can_attend
from daskserve.workers.probe import discover, verify
from daskserve.workers.runner import ModelRunner


def load_runner(model_dir: Path, config: EngineConfig) -> ModelRunner | DeviceRunner:
    """Load a causal language model onto its device and verify it.

    Parameters
    ----------
    model_dir
        Directory with ``config.json`` and safetensors weights.
    config
        ``dtype``, ``device``, ``num_threads``, ``block_size`` and ``max_batch_size`` are used.

    Raises
    ------
    ModelError
        The directory holds no usable model, or its architecture does not give the plain model's
        logits through paged attention.
    ConfigError
        There is no such device.
    """
    device = resolve_device(config.device)
    if device.type != "cpu":
        return load_device_runner(model_dir, config, device)
    num_threads = config.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    dtype = getattr(torch, config.dtype)
    model, facts, shape = _load_known_model(Path(model_dir), dtype, device)
    compiled: FusedDecoder | LayerAttention | None = None
    if can_fuse(model, facts):
        compiled = FusedDecoder(model, facts, shape, num_threads)
    elif can_attend(facts):
        compiled = LayerAttention(facts, dtype, num_threads)
    runner = ModelRunner(model, shape, dtype, num_threads, compiled)
    verify(runner, _architecture(model.config), config.block_size or runner.page_tokens)
    return runner


def load_device_runner(
    model_dir: Path,
    config: EngineConfig,
    device: torch.device,
    varlen: VarlenAttention | None = None,
) -> DeviceRunner:
    """As `load_runner`, for CUDA; with ``cpu`` and a ``varlen`` of its own without a GPU."""
    dtype = getattr(torch, config.dtype)
    model, facts, shape = _load_known_model(Path(model_dir), dtype, device)
    runner = DeviceRunner(model, facts, shape, dtype, device, config.max_batch_size, varlen)
    verify(runner, _architecture(model.config), config.block_size or runner.page_tokens)
    return runner


def _load_known_model(
    model_dir: Path, dtype: torch.dtype, device: torch.device
) -> tuple[torch.nn.Module, list[LayerFacts], ModelShape]:
    model = _load_model(model_dir, dtype).to(device)
    try:
        facts = discover(model)
    except Exception as error:  # a class may fail in its own ways on what it does not know
        raise ModelError(f"{_architecture(model.config)} cannot be served: {error}") from error
    text_config = model.config.get_text_config()
    shape = ModelShape(
        num_layers=len(facts),
        num_kv_heads=facts[0].num_kv_heads,
        head_dim=facts[0].head_dim,
        vocab_size=text_config.vocab_size,
        context_tokens=text_config.max_position_embeddings,
        eos_token_ids=_eos_token_ids(model),
    )
    return model, facts, shape


def _load_model(model_dir: Path, dtype: torch.dtype) -> torch.nn.Module:
    if not (model_dir / "config.json").is_file():
        raise ModelError(f"{model_dir} is not a model directory: it has no config.json")
    transformers_logging.disable_progress_bar()
    name = str(model_dir)
    try:
        hf_config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        name = f"{_architecture(hf_config)} in {model_dir}"
        with TRANSFORMERS_LOCK:
            model, loaded = AutoModelForCausalLM.from_pretrained(
                model_dir,
                config=hf_config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises many kinds for files that do not fit
        raise ModelError(f"{name} cannot be served: {error}") from error
    if loaded["missing_keys"]:
        missing = ", ".join(sorted(loaded["missing_keys"])[:3])
        raise ModelError(f"{name} cannot be served: its files have no weights for {missing}")
    return model.eval().requires_grad_(False)


def _architecture(config: PretrainedConfig) -> str:
    return (config.architectures or [config.model_type])[0]


def _eos_token_ids(model: torch.nn.Module) -> frozenset[int]:
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
