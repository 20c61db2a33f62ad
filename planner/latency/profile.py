"""Measured step times as a table: what fits and interpolated tables are made from."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from daskserve.errors import ConfigError

NAMES = {
    "phase": ("phase",),
    "tokens": ("tokens", "isl_or_ctx"),
    "batch": ("batch", "batch_size"),
    "tp": ("tp",),
}
SECONDS = {"latency_s": 1.0, "latency_ms": 1e-3}


@dataclass(frozen=True, eq=False)
class Profile:
    """Rows of measured steps.

    Parameters
    ----------
    dataset
        Dimension ``row`` with ``phase`` (``prefill`` or ``decode``), ``tokens`` (length of each
        prompt, or context of each request), ``batch``, ``tp`` and ``latency_s``.
    """

    dataset: xr.Dataset

    def __len__(self) -> int:
        return self.dataset.sizes["row"]

    def rows(self, phase: str, tp: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``(tokens, batch, latency_s)`` of one phase, at one TP degree if given."""
        data = self.dataset
        keep = data["phase"].values == phase
        if tp is not None:
            keep = keep & (data["tp"].values == tp)
        columns = (data[name].values[keep] for name in ("tokens", "batch", "latency_s"))
        tokens, batch, latency_s = columns
        return tokens, batch, latency_s

    @property
    def tensor_degrees(self) -> list[int]:
        return sorted({int(tp) for tp in self.dataset["tp"].values})


def read_profile(path: str | Path, **filters: str) -> Profile:
    """Read a CSV with columns phase, tokens (or isl_or_ctx), batch, tp, latency_s (or latency_ms).

    Parameters
    ----------
    filters
        Other columns and the value that a row must have: ``system="h100_sxm"``.

    Raises
    ------
    ConfigError
        Columns are missing, a value is not a positive number, or no row is left.
    """
    with open(path, newline="", encoding="utf-8") as lines:
        table = list(csv.DictReader(lines))
    if not table:
        raise ConfigError(f"no data: {path} holds no rows")
    columns = {name: _column(path, table[0], choices) for name, choices in NAMES.items()}
    latency = _column(path, table[0], tuple(SECONDS))
    for name in filters:
        _column(path, table[0], (name,))
    kept = [row for row in table if all(row[name] == str(v) for name, v in filters.items())]
    if not kept:
        raise ConfigError(f"no data: no row of {path} has {filters}")
    data: dict[str, Any] = {name: ("row", [_number(path, row[column]) for row in kept])
            for name, column in columns.items() if name != "phase"}  # fmt: skip
    data["latency_s"] = ("row", [_number(path, row[latency]) * SECONDS[latency] for row in kept])
    data["phase"] = ("row", [row[columns["phase"]] for row in kept])
    unknown = {row[columns["phase"]] for row in kept} - {"prefill", "decode"}
    if unknown:
        raise ConfigError(f"{path}: phase {unknown.pop()!r} must be prefill or decode")
    return Profile(xr.Dataset(data, attrs=dict(filters)))


def _column(path: str | Path, row: dict, choices: tuple[str, ...]) -> str:
    for name in choices:
        if name in row:
            return name
    raise ConfigError(f"{path} has no column {' or '.join(choices)}; it has {', '.join(row)}")


def _number(path: str | Path, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{path}: {text!r} must be a number above 0")
    return value
