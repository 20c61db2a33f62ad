"""Which packages are installed, and whether two processes run the same daskserve."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

PACKAGES = {
    "daskserve": "",
    "dask": "",
    "distributed": "",
    "numpy": "",
    "numba": "compiled attention on CPUs",
    "tokenizers": "",
    "torch": "the engine",
    "transformers": "the model classes",
    "safetensors": "weights",
    "dask-cuda": "dask cuda worker: a worker per GPU",
    "distributed-ucxx": "KV over NVLink and InfiniBand (ucx://)",
    "ucxx": "KV over NVLink and InfiniBand (ucx://)",
    "rmm": "one pool of GPU memory for the buffers of transfers",
    "nvidia-ml-py": "what doctor knows of GPUs",
    "dask-jobqueue": "daskserve deploy --target jobqueue",
}
"""Names, and what each that may be missing is for."""

_WIRE = ("core", "service")  # the rooms whose objects and messages go between processes


def versions() -> dict[str, str]:
    """Versions of what is installed; what is not has none. CUDA builds go by their plain name."""
    found = {}
    for name in PACKAGES:
        for candidate in (name, f"{name}-cu12", f"{name}-cu13"):
            try:
                found[name] = metadata.version(candidate)
                break
            except metadata.PackageNotFoundError:
                continue
    return {"python": ".".join(map(str, sys.version_info[:3])), **found}


@cache
def wire_digest() -> str:
    """Of the code whose messages must be understood by all sides: equal where that is equal."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for room in _WIRE:
        for path in sorted((package / room).glob("*.py")):
            digest.update(f"{room}/{path.name}".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
