"""Devices: which there is, and how much of its memory is for KV."""

from __future__ import annotations

import pytest
import torch

from daskserve.core.instance import EngineConfig
from daskserve.errors import ConfigError, InvalidParameter
from daskserve.models.catalog import resolve
from daskserve.workers.cuda.device import kv_memory_bytes, resolve_device
from daskserve.workers.loader import load_runner

GIB = 2**30


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error_that_says_why():
    assert resolve_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="device=cuda: PyTorch .*(pip install|nvidia-smi)"):
        resolve_device("cuda")
    with pytest.raises(ConfigError, match="device=cuda"):
        load_runner(resolve("tiny-random-llama"), EngineConfig(device="cuda"))


def test_an_unknown_device_is_refused():
    with pytest.raises(InvalidParameter, match="device='tpu' must be one of auto, cpu, cuda"):
        EngineConfig(device="tpu")
    with pytest.raises(InvalidParameter, match="gpu_memory_fraction"):
        EngineConfig(gpu_memory_fraction=1.5)


def test_kv_takes_what_weights_and_steps_leave():
    alone = kv_memory_bytes(80 * GIB, 60 * GIB, 16 * GIB, 0.9)
    assert 45 * GIB < alone < 56 * GIB
    assert kv_memory_bytes(80 * GIB, 60 * GIB, 16 * GIB, 0.45) < alone - 30 * GIB
    # Others have taken memory that the fraction would allow.
    assert kv_memory_bytes(80 * GIB, 10 * GIB, 16 * GIB, 0.9) < 10 * GIB
    with pytest.raises(ConfigError, match="16.0 GiB are weights"):
        kv_memory_bytes(80 * GIB, 60 * GIB, 16 * GIB, 0.2)
