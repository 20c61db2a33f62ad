import json
import subprocess
import sys

import pytest

from daskserve.errors import ModelError
from daskserve.models import ModelConfig, resolve


@pytest.fixture
def model_dir(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 8, "max_position_embeddings": 16})
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_a_complete_local_directory_is_used_as_it_is(model_dir):
    assert resolve(str(model_dir)) == model_dir


def test_a_directory_that_wants_its_code_run_is_refused(model_dir):
    (model_dir / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(ModelError, match="auto_map"):
        resolve(str(model_dir))


def test_a_tokenizer_that_wants_its_code_run_is_refused(model_dir):
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"auto_map": {}}))
    with pytest.raises(ModelError, match="tokenizer_config.json names code"):
        resolve(str(model_dir))


def test_a_directory_with_python_files_is_refused(model_dir):
    marker = model_dir / "was_run"
    (model_dir / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')")
    with pytest.raises(ModelError, match="modeling_evil.py"):
        resolve(str(model_dir))
    assert not marker.exists()


def test_pickled_weights_are_refused(model_dir):
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only pickled weights"):
        resolve(str(model_dir))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_missing_part_is_named(model_dir, missing):
    (model_dir / missing).unlink()
    with pytest.raises(ModelError, match=missing):
        resolve(str(model_dir))


def test_an_unknown_name_gets_the_nearest_known_one():
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        resolve("smolm2-135m")
    with pytest.raises(ModelError, match="tiny-random-llama"):
        resolve("tiny-random-lama")


@pytest.mark.parametrize("name", ["", "\0", "~nobody-here", "a" * 5000, "../x\ud800", "http://x/y"])
def test_names_that_cannot_be_models_are_refused(name):
    with pytest.raises(ModelError, match="no model"):
        resolve(name)


def test_the_mock_needs_no_torch(tmp_path):
    code = (
        "import sys; from daskserve.models import resolve; from daskserve.text import Tokenizer;"
        "Tokenizer.load(resolve('mock')); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_eos_of_the_generation_configuration_comes_first(model_dir):
    config = {"vocab_size": 8, "n_positions": 16, "eos_token_id": 5}
    (model_dir / "config.json").write_text(json.dumps(config))
    assert ModelConfig.load(model_dir).eos_token_ids == {5}
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert ModelConfig.load(model_dir).eos_token_ids == {1, 2}


def test_a_nested_text_configuration_is_read(model_dir):
    text = {"model_type": "gemma3_text", "vocab_size": 9, "max_position_embeddings": 32}
    (model_dir / "config.json").write_text(json.dumps({"text_config": text, "eos_token_id": 1}))
    assert ModelConfig.load(model_dir) == ModelConfig("gemma3_text", 9, 32, frozenset({1}))
