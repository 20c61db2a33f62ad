"""Engines on the device path, on the CPU: PyTorch's varlen_attn is replaced by plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from daskserve.core.instance import EngineConfig, Role
from daskserve.models.catalog import resolve
from daskserve.text.tokenizer import Tokenizer
from daskserve.workers.cuda import reference
from daskserve.workers.cuda.attention import VarlenAttention
from daskserve.workers.cuda.runner import DeviceRunner
from daskserve.workers.engine import Engine
from daskserve.workers.loader import load_device_runner
from daskserve.workers.loading import build_engine

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def load_on_device() -> Callable[..., DeviceRunner]:
    """``load_on_device(folder, **config)``: a verified runner with varlen_attn's stand-in."""

    def load(folder, **settings) -> DeviceRunner:
        config = EngineConfig(**({"dtype": "float32", "num_threads": 1} | settings))
        varlen = VarlenAttention(reference.varlen_attn)
        return load_device_runner(folder, config, CPU, varlen)

    return load


@pytest.fixture(scope="session")
def make_device_engine(load_on_device) -> Callable[..., Engine]:
    """``make_device_engine(role, model, **config)``: an engine on the device path."""

    @functools.cache
    def loaded(model: str, block_size: int | None) -> tuple[DeviceRunner, Tokenizer]:
        folder = resolve(model)
        return load_on_device(folder, block_size=block_size), Tokenizer.load(folder)

    def make(role: Role, model: str = "tiny-random-llama", **settings) -> Engine:
        config = EngineConfig(model=model, dtype="float32", num_threads=1, num_kv_blocks=64)
        config = replace(config, **settings)
        # A runner of its own: each is bound to one pool.
        runner, tokenizer = loaded(model, config.block_size)
        own = DeviceRunner(
            runner.model,
            runner.facts,
            runner.shape,
            runner.dtype,
            CPU,
            config.max_batch_size,
            VarlenAttention(reference.varlen_attn),
        )
        return build_engine(role, config, lambda _: (own, tokenizer))

    return make
