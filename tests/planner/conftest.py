"""Where the public traces and measured step times are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """Folder with azure2023/, mooncake/ and the other traces."""
    given = os.environ.get("DASKSERVE_TRACES")
    folder = Path(given) if given else ROOT.parent / "shared" / "data" / "traces"
    if not (folder / "azure2023").is_dir():
        pytest.skip(f"no traces at {folder}; set DASKSERVE_TRACES to a copy")
    return folder


@pytest.fixture(scope="session")
def step_latency_csv() -> Path:
    """Measured step times of Llama 3.1 on H100 and H200."""
    path = ROOT.parent / "shared" / "data" / "silicon" / "step_latency.csv"
    if not path.is_file():
        pytest.skip(f"no measured step times at {path}")
    return path
