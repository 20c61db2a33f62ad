"""DistServe's published A100 profile: step-time coefficients, KV capacities and model shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from daskserve.errors import ConfigError

DISTSERVE = "distserve"
VLLM = "vllm"

Triple = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """Milliseconds for one pass of the whole model at one tensor-parallel degree.

    Parameters
    ----------
    prefill
        ``a + b * tokens + c * sum(length**2)`` over the prompts of the batch.
    decode_small, decode_large
        ``a + b * sum(context + 1) + c * batch size``.
    large_batch_from
        Smallest batch that ``decode_large`` describes.
    """

    prefill: Triple
    decode_small: Triple
    decode_large: Triple
    large_batch_from: int


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """What the published profile holds about one model.

    Parameters
    ----------
    kv_capacity_tokens
        By ``(tp, pp)``; a pair that is missing does not run.
    coefficients
        By backend (``"distserve"``, ``"vllm"``), then by tensor-parallel degree.
    """

    name: str
    num_layers: int
    num_heads: int
    kv_capacity_tokens: Mapping[tuple[int, int], int]
    coefficients: Mapping[str, Mapping[int, StepCoefficients]]

    @property
    def tensor_degrees(self) -> list[int]:
        """Every TP that divides the heads."""
        return _divisors(self.num_heads)

    @property
    def pipeline_degrees(self) -> list[int]:
        """Every PP that divides the layers."""
        return _divisors(self.num_layers)


def model_profile(name: str) -> ModelProfile:
    """The published profile of a model such as ``facebook/opt-13b``.

    Raises
    ------
    ConfigError
        No such model was profiled.
    """
    models = _load()
    if name not in models:
        raise ConfigError(f"model {name!r} has no published profile; there are {sorted(models)}")
    return models[name]


@cache
def _load() -> dict[str, ModelProfile]:
    path = files("daskserve.planner") / "profiles" / "distserve-a100-80g.json"
    models = json.loads(path.read_text(encoding="utf-8"))["models"]
    return {name: _parse(name, entry) for name, entry in models.items()}


def _parse(name: str, entry: dict[str, Any]) -> ModelProfile:
    coefficients = {
        backend: {
            int(tp): StepCoefficients(
                tuple(row["prefill"]),
                tuple(row["decode_small"]),
                tuple(row["decode_large"]),
                row["large_batch_from"],
            )
            for tp, row in rows.items()
        }
        for backend, rows in entry["backends"].items()
    }
    capacity = {(tp, pp): tokens for tp, pp, tokens in entry["kv_capacity"]}
    return ModelProfile(name, entry["layers"], entry["heads"], capacity, coefficients)


def _divisors(number: int) -> list[int]:
    return [degree for degree in range(1, number + 1) if number % degree == 0]
