"""torch and transformers: what to know when a model is built, converted or loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from daskserve.errors import ModelError

TRANSFORMERS_LOCK = threading.RLock()
"""Hold it while a model is made: transformers swaps methods of its classes meanwhile, and two
threads at once would leave them swapped, so that later models lose their tied weights."""


@contextmanager
def engine_packages(purpose: str) -> Iterator[None]:
    """Turns a missing package of the ``engine`` extra into a ModelError that says what to do."""
    try:
        yield
    except ImportError as error:
        raise ModelError(
            f"{purpose} needs the package {error.name}: pip install 'daskserve[engine]'"
        ) from error


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keeps transformers' own progress bars out of the user's terminal."""
    from transformers.utils import logging

    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()
