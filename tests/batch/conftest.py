from __future__ import annotations

import pytest

from daskserve import EngineConfig, Service


@pytest.fixture(scope="session")
def service():
    """One prefill and one decode instance of the mock model, as the command line makes them."""
    with Service.local(prefill=1, decode=1, config=EngineConfig(model="mock")) as service:
        yield service
