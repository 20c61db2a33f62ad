"""What an instance is: its role, how its engine is set up, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from daskserve.errors import InvalidParameter

DTYPES = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
DEFAULT_BLOCK_SIZE = 16
"""Tokens per page where nothing asks for another size."""

_OPTIONAL_COUNTS = (
    "num_kv_blocks",
    "kv_memory_bytes",
    "block_size",
    "prefill_budget_tokens",
    "chunk_tokens",
    "num_threads",
)

HOST_KV_BYTES = 2**30
"""Memory for KV on the CPU where the configuration does not say how much."""

DEFAULT_BUDGET_TOKENS = 512
"""L_m where neither the configuration nor a profile says it."""


class Role(StrEnum):
    """The name is also the Dask resource that workers of this role carry."""

    PREFILL = "PREFILL"
    DECODE = "DECODE"
    COLOCATED = "COLOCATED"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to build the engine of one instance.

    Parameters
    ----------
    model
        ``smollm2-135m``, a local directory, a Hub id, ``tiny-random-<architecture>``, or
        ``mock`` (fixed step time, for load tests).
    dtype
        ``float32`` (tokens equal to ``generate``) or ``bfloat16``.
    device
        ``cpu``, ``cuda``, or ``auto``: CUDA where PyTorch and the machine have it.
    num_kv_blocks
        Pages in the KV pool, scratch page excluded; None sizes it from ``kv_memory_bytes``.
    kv_memory_bytes
        Memory for KV when ``num_kv_blocks`` is None; of every rank, where there are several.
        None: 1 GiB on CPUs, on CUDA what ``gpu_memory_fraction`` leaves beside the weights.
    gpu_memory_fraction
        The share of a card's memory that an instance may take, weights and all.
    block_size
        Tokens per page; instances that exchange KV need the same. None: 16, on CUDA 256 where
        PyTorch's attention reads pages of that size (2.12 or later).
    prefill_budget_tokens
        L_m: prompts are batched up to this many tokens, a longer one runs alone
        (DistServe section 4.3); None uses the profile of this machine or the default.
    chunk_tokens
        COLOCATED only: chunked prefill with this many tokens per mixed step; None runs whole
        prompts first.
    max_batch_size
        Most requests in one decode step.
    num_threads
        Threads for the matrix products; None uses the cores that the process may run on.
    kv_lease_s
        How long a prefilled request's KV waits to be pulled before its memory is taken back.
    kv_pull_timeout_s
        Most seconds for one KV pull; after that the decode side computes the prompt again,
        and the prefill side may take pages back that were being read.
    rank_timeout_s
        Instances of several workers: so long without an answer of a rank, and it is lost.
    mock_prefill_s, mock_decode_s
        Step times of the mock model.
    """

    model: str = "smollm2-135m"
    dtype: str = "bfloat16"
    device: str = "auto"
    num_kv_blocks: int | None = None
    kv_memory_bytes: int | None = None
    gpu_memory_fraction: float = 0.9
    block_size: int | None = None
    prefill_budget_tokens: int | None = None
    chunk_tokens: int | None = None
    max_batch_size: int = 64
    num_threads: int | None = None
    kv_lease_s: float = 60.0
    kv_pull_timeout_s: float = 30.0
    rank_timeout_s: float = 30.0
    mock_prefill_s: float = 0.01
    mock_decode_s: float = 0.01

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidParameter("dtype", self.dtype, f"must be one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise InvalidParameter("device", self.device, f"must be one of {', '.join(DEVICES)}")
        if not 0 < self.gpu_memory_fraction <= 1:
            raise InvalidParameter(
                "gpu_memory_fraction", self.gpu_memory_fraction, "must be above 0, at most 1"
            )
        _check_positive("max_batch_size", self.max_batch_size)
        for name in _OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        for name in ("kv_lease_s", "kv_pull_timeout_s", "rank_timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidParameter(name, getattr(self, name), "must be above 0")


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidParameter(name, value, "must be a whole number of at least 1")


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """What a running instance says of itself, for routing, validation and display."""

    role: Role
    model: str
    dtype: str
    context_tokens: int
    block_size: int
    num_kv_blocks: int
    max_batch_size: int
    kv_layout: str
    """Fingerprint of model, dtype, block size and shape: only equal ones may exchange KV."""
    model_digest: str = ""
    """Of configuration and weights, see `daskserve.models.identity`."""


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """A snapshot of an instance's counters; exact, taken between steps."""

    num_waiting: int = 0
    num_running: int = 0
    num_holding: int = 0
    """Prefilled requests whose KV waits to be pulled."""
    waiting_tokens: int = 0
    used_kv_blocks: int = 0
    free_kv_blocks: int = 0
    num_steps: int = 0
    num_finished: int = 0
    num_tokens: int = 0
    """Prompt and output tokens computed so far."""
    bubble_share: float = 0.0
    """Of the steps' time, how much the pipeline stages waited for each other; a rank reports it
    every few seconds."""
