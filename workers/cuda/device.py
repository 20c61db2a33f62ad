"""Which device an engine runs on, and how much of its memory the KV pool may take."""

from __future__ import annotations

import torch

from daskserve.errors import ConfigError

OLDEST_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 matrix products."""

_ACTIVATIONS_SHARE = 0.08  # of the card: hidden states and logits of a step, graphs, kernels


def resolve_device(wanted: str) -> torch.device:
    """``cpu``, ``cuda``, or with ``auto`` whichever there is.

    Raises
    ------
    ConfigError
        ``cuda`` is wanted and cannot be had; the message says what is missing.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    missing = why_no_cuda()
    if missing is None:
        return torch.device("cuda", torch.cuda.current_device())
    if wanted == "auto":
        return torch.device("cpu")
    raise ConfigError(f"device=cuda: {missing}")


def why_no_cuda() -> str | None:
    """What keeps this process from computing on a GPU, and what to do; None if nothing does."""
    if torch.version.cuda is None:
        return (
            f"PyTorch {torch.__version__} is built without CUDA: pip install 'daskserve[gpu]' and"
            " a PyTorch of at least 2.11 with CUDA, or use device=cpu"
        )
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use device=cpu"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_CAPABILITY:
        name = torch.cuda.get_device_name()
        shown, least = (".".join(map(str, each)) for each in (capability, OLDEST_CAPABILITY))
        return f"{name} has compute capability {shown}, at least {least} is needed"
    return None


def kv_memory_bytes(
    total_bytes: int, free_bytes: int, own_bytes: int, memory_fraction: float
) -> int:
    """Bytes for KV on a card.

    Parameters
    ----------
    total_bytes, free_bytes
        Of the card, as the driver says.
    own_bytes
        What this process has taken already: the weights.
    memory_fraction
        The share of the card that this process may take in all.

    Raises
    ------
    ConfigError
        Nothing is left.
    """
    room = min(total_bytes * memory_fraction - own_bytes, free_bytes)
    room -= total_bytes * _ACTIVATIONS_SHARE * memory_fraction
    if room <= 0:
        raise ConfigError(
            f"gpu_memory_fraction={memory_fraction:g} of {_gib(total_bytes)} leaves nothing for KV:"
            f" {_gib(own_bytes)} are weights, {_gib(free_bytes)} are free"
        )
    return int(room)


def free_kv_bytes(device: torch.device, memory_fraction: float) -> int:
    """`kv_memory_bytes` of this card now (ConfigError)."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    own_bytes = torch.cuda.memory_reserved(device)
    return kv_memory_bytes(total_bytes, free_bytes, own_bytes, memory_fraction)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
