"""How the simulator's functions are compiled, and what the compiled loop is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from numba import njit

from daskserve.scheduling import batching, routing

inner: Callable = njit(
    nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)
"""Compiles a function that only compiled functions call."""


inlined: Callable = njit(nogil=True, error_model="numpy", inline="always")
"""Merges a function into its only caller: each compiled function holds all that it calls, so
every level near the top that is left out saves seconds of compilation."""


def source_digest() -> int:
    """Digest of every source that the compiled loop holds, as an int64."""
    files = [*Path(__file__).parent.glob("*.py"), Path(batching.__file__), Path(routing.__file__)]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return int.from_bytes(digest.digest()[:7])
