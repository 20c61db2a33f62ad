"""Prefill/decode-disaggregated LLM inference on Dask.

Importing this package loads neither torch nor distributed: the names below are
looked up on first use, so that the planner stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "SamplingParams": "daskserve.core.params",
    "Request": "daskserve.core.request",
    "Completion": "daskserve.core.request",
    "SLO": "daskserve.core.slo",
    "Role": "daskserve.core.instance",
    "EngineConfig": "daskserve.core.instance",
    "Service": "daskserve.service",
    "run_batch": "daskserve.batch",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'daskserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
