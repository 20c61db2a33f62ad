"""Reads parts of a model's weights from its safetensors files, never the whole model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from daskserve.errors import ModelError

_CPU = torch.device("cpu")


class Checkpoint:
    """The tensors of a model directory by name.

    Parameters
    ----------
    model_dir
        Directory with ``*.safetensors``.
    dtype, device
        What weights are given as, and where.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device = _CPU) -> None:
        self._model_dir = model_dir
        self._dtype, self._device = dtype, device
        self._files: dict[str, Path] = {}
        for path in sorted(model_dir.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                self._files |= dict.fromkeys(file.keys(), path)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """A tensor, or these rows or columns of it, in memory of its own (ModelError)."""
        path = self._files.get(name)
        if path is None:
            raise ModelError(f"{self._model_dir} has no weights for {name}")
        with safe_open(path, "pt") as file:
            stored = file.get_slice(name)
            if columns is not None:
                tensor = stored[:, columns.start : columns.stop]
            elif rows is not None:
                tensor = stored[rows.start : rows.stop]
            else:
                tensor = stored[:]
        # A copy: what is read may be a view of the mapped file, which lives as long as its views.
        return tensor.to(
            self._device, self._dtype, copy=True, memory_format=torch.contiguous_format
        )
