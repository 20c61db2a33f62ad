"""The decorators of all kernels: no GIL, cached on disk until any kernel source changes.

numba looks only at the file of the function itself when it decides whether a cached binary is
still good, and these kernels inline each other across files. So the cache folder is named after
all of them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import numba
from numba.core import config, typing

from daskserve.models.cache import cache_dir

_SOURCES = sorted(Path(__file__).parent.glob("*.py"))
_DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:16]
_FOLDER = cache_dir() / "kernels" / _DIGEST


def kernel(function: Callable) -> Callable:
    """Compile ``function`` at its first call; later processes load it from the cache."""
    return _cached_here(numba.njit(cache=True, nogil=True, error_model="numpy"), function)


def pointer(signature: typing.Signature) -> Callable[[Callable], Callable[[], int]]:
    """Make a function that compiles a C callback at its first call and returns its address."""

    def wrap(function: Callable) -> Callable[[], int]:
        @functools.cache
        def compiled() -> object:
            return _cached_here(numba.cfunc(signature, cache=True, error_model="numpy"), function)

        return lambda: compiled().address

    return wrap


def _cached_here(decorate: Callable, function: Callable) -> Callable:
    previous = config.CACHE_DIR
    config.CACHE_DIR = str(_FOLDER)
    try:
        return decorate(function)
    finally:
        config.CACHE_DIR = previous
