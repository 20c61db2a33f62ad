"""Where the outputs of DistServe's original simulator are."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent


@pytest.fixture(scope="session")
def distserve_dir() -> Path:
    """Folder with the raw profile files and ``reference/``."""
    folder = ROOT.parent / "shared" / "data" / "distserve"
    if not (folder / "reference").is_dir():
        pytest.skip(f"no outputs of the original simulator at {folder}")
    return folder
