"""Reads what people type: GPUs, durations, models and profiles."""

from __future__ import annotations

import re
from pathlib import Path

from daskserve.errors import ConfigError
from daskserve.planner.hardware import GBPS, Cluster, NodeGroup, gpu_named
from daskserve.planner.latency import (
    CalibratedModel,
    DistServeA100,
    LatencyModel,
    Roofline,
    TableModel,
    read_calibration,
    read_profile,
)
from daskserve.planner.model_spec import ModelSpec

DURATION = re.compile(r"^\s*([0-9.eE+-]+)\s*(ms|s)?\s*$")
LIKELY_MS = {"TTFT": 60.0, "TPOT": 2.0}
"""Bare numbers above these many seconds were most likely meant as milliseconds."""
GPUS = re.compile(r"^([A-Za-z0-9]+)(?::(\d+)(?:x(\d+))?)?(?:@([0-9.]+))?$")
BUILT_IN = ("roofline", "distserve-a100", "distserve-a100-vllm")


def seconds(name: str, text: str) -> tuple[float, str]:
    """``(seconds, warning)`` of ``0.25``, ``0.25s`` or ``250ms``; the warning may be empty.

    Raises
    ------
    ConfigError
        Not a duration.
    """
    match = DURATION.match(text)
    try:
        value = float(match.group(1)) if match else None
    except ValueError:
        value = None
    if match is None or value is None:
        raise ConfigError(f"{name}: {text!r} is not a duration; write 0.25, 0.25s or 250ms")
    if match.group(2) == "ms":
        return value / 1e3, ""
    if match.group(2) is None and value > LIKELY_MS[name]:
        return value, (
            f"{name} {text} is read as {value:g} seconds; write {text}ms if it is milliseconds"
        )
    return value, ""


def cluster_of(texts: tuple[str, ...], network_gbps: float | None = None) -> Cluster:
    """A cluster of ``H100:8x4`` (8 per node, 4 nodes; ``@2.5``: dollars per GPU and hour).

    ``network_gbps`` is that of one node; None takes the cluster's default.

    Raises
    ------
    ConfigError, ClusterError
        Not of that form, unknown GPU.
    """
    groups = []
    for text in texts:
        match = GPUS.match(text)
        if match is None:
            raise ConfigError(
                f"--gpus {text!r} must look like H100:8x4 (8 per node, 4 nodes) or H100:8x4@2.5"
            )
        name, per_node, nodes, price = match.groups()
        gpu = gpu_named(name)
        if price is not None:
            gpu = gpu.priced(float(price))
        groups.append(NodeGroup(gpu, int(nodes or 1), int(per_node or 1)))
    if network_gbps is None:
        return Cluster(tuple(groups))
    return Cluster(tuple(groups), network_bandwidth=network_gbps * GBPS)


def calibrated(text: str, allow_untrusted: bool) -> CalibratedModel | None:
    """The model in a profile file of ``daskserve calibrate``; None for other step times.

    Raises
    ------
    ConfigError
        An unreadable or untrusted profile, or ``allow_untrusted`` for step times of other kinds.
    """
    if text.endswith(".json"):
        return read_calibration(text, allow_untrusted).latency()
    if allow_untrusted:
        raise ConfigError("--allow-untrusted is for --latency FILE.json of daskserve calibrate")
    return None


def model_named(name: str | None, latency: CalibratedModel | None) -> ModelSpec:
    """The model of that name; without one, or by the name in it, that of the calibration."""
    if latency is not None and name in (None, "", latency.model.name):
        return latency.model
    if not name:
        raise ConfigError("give --model, or --application, which sets it")
    return ModelSpec.load(name)


def latency_model(text: str, network_bandwidth: float | None, typical_context: int) -> LatencyModel:
    """``roofline``, ``distserve-a100``, ``distserve-a100-vllm`` or a CSV of measured steps.

    For JSON see `calibrated`.

    Raises
    ------
    ConfigError
        Neither a known name nor a readable profile.
    """
    if text == "roofline":
        return Roofline(network_bandwidth=network_bandwidth, typical_context_tokens=typical_context)
    if text.startswith("distserve-a100"):
        if text not in BUILT_IN:
            raise ConfigError(f"--latency {text!r}: known are {', '.join(BUILT_IN)} or a file")
        return DistServeA100("vllm" if text.endswith("vllm") else "distserve")
    if not Path(text).is_file():
        raise ConfigError(f"--latency {text!r} is no file; known are {', '.join(BUILT_IN)}")
    return TableModel(read_profile(text))
