"""Which GPU each rank of an own cluster gets, and what is missing where there is none to give.

Nothing here imports PyTorch or touches a GPU: the client's process needs neither.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from daskserve.core.instance import EngineConfig
from daskserve.core.placement import Parallelism
from daskserve.errors import ConfigError

logger = logging.getLogger(__name__)

RMM_POOL = "512MiB"
"""Where KV arrives over UCX. PyTorch keeps its own allocator: RMM's cannot hold the memory pools of
CUDA graphs, and weights and KV are allocated once."""

INSTALL = "pip install 'daskserve[gpu]'"
_UCX = {"distributed_ucxx": "distributed-ucxx-cu12", "rmm": "rmm-cu12"}
_DASK_CUDA = {"dask_cuda": "dask-cuda"}


@dataclass(frozen=True, slots=True)
class Cards:
    """The GPU of every rank, in the order in which they are started.

    Parameters
    ----------
    of_rank
        As for ``CUDA_VISIBLE_DEVICES``.
    protocol
        ``ucx``, which carries device memory, or ``tcp``.
    """

    of_rank: tuple[str, ...]
    protocol: str

    @property
    def most_on_one(self) -> int:
        """Ranks on the card that has the most."""
        return max(self.of_rank.count(card) for card in self.of_rank)

    def engine(self, config: EngineConfig) -> EngineConfig:
        """The engine with its share of a card's memory."""
        share = config.gpu_memory_fraction / self.most_on_one
        return replace(config, device="cuda", gpu_memory_fraction=share)

    def options_of(self, rank: int) -> dict[str, Any]:
        """For the worker of a rank, beside what it needs on a CPU."""
        options: dict[str, Any] = {
            "env": {"CUDA_VISIBLE_DEVICES": self.of_rank[rank]},
        }
        if self.protocol == "ucx":
            # UCX must find the CUDA context when it starts, long before the model is loaded.
            options["config"] = {
                "distributed-ucxx.create-cuda-context": True,
                "distributed-ucxx.rmm.pool-size": RMM_POOL,
            }
        return options


def on_device(
    config: EngineConfig,
    device: str | None,
    shapes: Sequence[Parallelism],
    protocol: str | None = None,
) -> tuple[EngineConfig, Cards | None]:
    """The engine on the device that there is, and the cards of its ranks (ConfigError).

    ``device`` None is that of ``config``.
    """
    config = replace(config, device=device or config.device)
    cards = None if config.model == "mock" else find_cards(config.device, shapes, protocol)
    return (replace(config, device="cpu"), None) if cards is None else (cards.engine(config), cards)


def placed_on(cards: Cards | None, configs: Mapping[str, EngineConfig]) -> dict[str, EngineConfig]:
    """Engines of single instances where all the others are."""
    if cards is None:
        return {name: replace(config, device="cpu") for name, config in configs.items()}
    return {name: cards.engine(config) for name, config in configs.items()}


def find_cards(
    device: str, shapes: Sequence[Parallelism], protocol: str | None = None
) -> Cards | None:
    """The cards for ranks of these shapes; None: they run on the CPU.

    Parameters
    ----------
    device
        As in ``EngineConfig``.
    shapes
        Of all instances.
    protocol
        Of the workers; None is UCX where it is installed.

    Raises
    ------
    ConfigError
        ``cuda`` is asked for and something is missing.
    """
    if device == "cpu" or not shapes:
        return None
    missing = what_is_missing(shapes)
    if missing is not None:
        if device == "auto":
            return None
        raise ConfigError(f"device=cuda: {missing}")
    protocol = protocol or ("tcp" if lacking(_UCX) else "ucx")
    return share_cards(visible_cards(), sum(shape.num_gpus for shape in shapes), protocol)


def share_cards(cards: Sequence[str], num_ranks: int, protocol: str) -> Cards:
    """One card for every rank while there are enough, then several ranks on a card in turn.

    Ranks of one instance follow one another: they are on different cards, as NCCL needs it.
    """
    return Cards(tuple(cards[rank % len(cards)] for rank in range(num_ranks)), protocol)


def what_is_missing(shapes: Sequence[Parallelism]) -> str | None:
    """Why instances of these shapes cannot compute on GPUs here; None when nothing is missing."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return f"PyTorch is not installed: {INSTALL} and a PyTorch with CUDA"
    if version.endswith("+cpu"):
        return (
            f"PyTorch {version} is built without CUDA: install a PyTorch with CUDA, and {INSTALL}"
        )
    cards = visible_cards()
    if not cards:
        return "no GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    largest = max(shapes, key=lambda shape: shape.num_gpus)
    if largest.num_gpus > len(cards):
        return (
            f"every rank of an instance needs a GPU of its own: {largest} has {largest.num_gpus}"
            f" ranks, {len(cards)} GPUs are visible; use smaller instances or device=cpu"
        )
    return None


def visible_cards() -> list[str]:
    """The cards that this process may use, as for ``CUDA_VISIBLE_DEVICES``."""
    from distributed.diagnostics import nvml

    count = nvml.device_get_count()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if count and listed is not None:
        return [card for card in listed.split(",") if card not in ("", "-1", "NoDevFiles")]
    return [str(index) for index in range(count)]


def lacking(packages: dict[str, str]) -> list[str]:
    """The packages of these modules that are not installed."""
    return [name for module, name in packages.items() if importlib.util.find_spec(module) is None]


def require_dask_cuda() -> None:
    """ConfigError if what a GPU for every rank needs is not installed."""
    missing = lacking(_DASK_CUDA | _UCX)
    if missing:
        raise ConfigError(f"device=cuda needs {', '.join(missing)}: {INSTALL}")
