from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dask.config
import pytest
import yaml

import daskserve
from daskserve.config import Settings, _valid_keys, settings
from daskserve.errors import ConfigError

PACKAGE = Path(daskserve.__file__).parent


def test_packaged_defaults_are_valid():
    assert settings().batch.max_line_bytes == 4 * 2**20


def test_override_through_dask_config():
    with dask.config.set({"daskserve.batch.max-in-flight": 7}):
        assert settings().batch.max_in_flight == 7


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DASK_DASKSERVE__BATCH__MAX_IN_FLIGHT", "12", "12"),
        (
            "DASK_DASKSERVE__BATCH__MAX_INFLIGHT",
            "12",
            "daskserve.batch.max-inflight is not a setting; "
            "did you mean daskserve.batch.max-in-flight?",
        ),
    ],
)
def test_environment_variables(variable, value, message):
    code = (
        "from daskserve.config import settings\n"
        "from daskserve.errors import ConfigError\n"
        "try: print(settings().batch.max_in_flight)\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == message


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("batch.max-in-flight", 0, "daskserve.batch.max-in-flight=0: input should be greater"),
        ("batch.sync-interval-s", "fast", "daskserve.batch.sync-interval-s='fast'"),
        ("batches", {}, "did you mean"),
        ("zzz", 1, "the settings are daskserve.batch.max-in-flight"),
    ],
)
def test_wrong_values_and_names_are_explained(key, value, part):
    with dask.config.set({f"daskserve.{key}": value}), pytest.raises(ConfigError) as e:
        settings()
    assert part in str(e.value)


def test_file_and_models_have_the_same_keys():
    def keys(node, prefix):
        if not isinstance(node, dict):
            return [prefix]
        return [k for name, inner in node.items() for k in keys(inner, f"{prefix}.{name}")]

    written = yaml.safe_load((PACKAGE / "daskserve.yaml").read_text())
    assert keys(written["daskserve"], "daskserve") == _valid_keys(Settings, "daskserve")


def test_every_setting_is_read_somewhere():
    sources = "\n".join(
        path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "config.py"
    )
    unread = [
        key
        for key in _valid_keys(Settings, "daskserve")
        if f".{key.rsplit('.', 1)[1].replace('-', '_')}" not in sources
    ]
    assert unread == []
