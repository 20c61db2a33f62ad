"""What several test modules share: the prompts of public data sets and the default model."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from daskserve.errors import ModelError
from daskserve.models import resolve

ROOT = Path(__file__).resolve().parent.parent

# The same examples in every run, and no failure because a shared machine was slow.
COMMON = dict(deadline=None, derandomize=True, database=None)
settings.register_profile("quick", **COMMON, max_examples=30)
settings.register_profile("thorough", **COMMON, max_examples=150)
settings.load_profile(os.environ.get("DASKSERVE_HYPOTHESIS", "quick"))

# A shell's job in the background ignores SIGINT, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def what_is_old_is_not_searched() -> Iterator[None]:
    """What other modules imported and compiled is no garbage: collections need not look at it."""
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(scope="session")
def prompts_dir() -> Path:
    """Folder with HumanEval.jsonl.gz and the other prompt files."""
    given = os.environ.get("DASKSERVE_TRACES")
    traces = Path(given) if given else ROOT.parent / "shared" / "data" / "traces"
    if not (traces / "prompts").is_dir():
        pytest.skip(f"no prompts at {traces}/prompts; set DASKSERVE_TRACES to a copy")
    return traces / "prompts"


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model, fetched and converted on first use."""
    try:
        return resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"the default model cannot be had here: {error}")
