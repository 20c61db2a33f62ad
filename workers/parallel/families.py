"""The model families that run on several ranks, and where their modules are.

Column-split linears give each rank the outputs of its heads or inner features; row-split ones
take those as inputs and add up over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from daskserve.errors import ModelError

COLUMN_SPLIT = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"})
ROW_SPLIT = frozenset({"o_proj", "out_proj", "down_proj", "fc2"})


class NoPositions(torch.nn.Module):
    """Stands for position embeddings where the first stage has added them already."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(())


@dataclass(frozen=True, slots=True)
class Family:
    """How the modules of a family are cut into stages.

    Parameters
    ----------
    base
        Path of the module that runs the layers.
    first_only, last_only
        Modules of ``base`` that only the first and the last stage have, and what the others have
        in their place.
    inner_size
        Attribute of the configuration: features between the two halves of a layer.
    num_inner
        Matrices between the hidden and those features.
    """

    base: str
    first_only: Mapping[str, Callable[[], torch.nn.Module | None]]
    last_only: Mapping[str, Callable[[], torch.nn.Module | None]]
    inner_size: str = "intermediate_size"
    num_inner: int = 3


def _nothing() -> None:
    return None


_LLAMA = Family(
    base="model",
    first_only={"embed_tokens": _nothing},
    last_only={"norm": torch.nn.Identity},
)
_OPT = Family(
    base="model.decoder",
    first_only={"embed_tokens": _nothing, "project_in": _nothing, "embed_positions": NoPositions},
    last_only={"final_layer_norm": _nothing, "project_out": _nothing},
    inner_size="ffn_dim",
    num_inner=2,
)
FAMILIES = {"llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA, "opt": _OPT}


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model (ModelError)."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ModelError(
            f"{config.model_type} cannot be served by an instance of several workers, only"
            f" {', '.join(FAMILIES)}; use instances of one worker"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            "quantized weights cannot be served by an instance of several workers; use the model"
            " in bfloat16 or float32"
        )
    return family
