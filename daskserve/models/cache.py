"""The cache folder: each model is built beside its place and renamed into it, once.

Processes that need the same model at the same time wait for the one that builds it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from daskserve.errors import ModelError

BUILD_DEADLINE_S = 900.0
_POLL_S = 0.1


def cache_dir() -> Path:
    """``$DASKSERVE_CACHE``, or ``~/.cache/daskserve``."""
    chosen = os.environ.get("DASKSERVE_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "daskserve"


def cached(name: str) -> Path | None:
    """The folder ``name`` in the cache, or None when it has not been built."""
    path = cache_dir() / "models" / name
    return path if path.is_dir() else None


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The folder ``name`` in the cache, made by ``build(empty_folder)`` if it is not there yet.

    Raises
    ------
    ModelError
        The cache cannot be written, or another process held the build for 15 minutes.
    """
    ready = cached(name)
    if ready is not None:
        return ready
    models = cache_dir() / "models"
    target = models / name
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{name}.lock"):
            if not target.is_dir():
                _build_beside(target, build)
    except OSError as error:
        raise ModelError(
            f"cannot write {target}: {error.strerror or error}; "
            "free some space or set DASKSERVE_CACHE to another folder"
        ) from error
    return target


def _build_beside(target: Path, build: Callable[[Path], None]) -> None:
    """Under the lock, so whatever scratch folder of this name is there was left by a kill."""
    for leftover in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        build(scratch)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + BUILD_DEADLINE_S
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"another process has held {path} for {BUILD_DEADLINE_S:.0f} s; "
                        "end it, then try again"
                    ) from None
                time.sleep(_POLL_S)
        yield
