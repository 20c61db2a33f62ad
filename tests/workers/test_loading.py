"""Instances that cannot get their model."""

import pytest

from daskserve.core.instance import EngineConfig, Role
from daskserve.errors import ModelError
from daskserve.workers.instance import Instance


def test_a_model_that_does_not_load_is_an_error_of_start() -> None:
    with pytest.raises(ModelError, match="no-such-model"):
        Instance(Role.DECODE, EngineConfig(model="no-such-model")).start()
