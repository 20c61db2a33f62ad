"""Models are loaded whole, several at once in one process too, or refused."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from daskserve.core.instance import EngineConfig
from daskserve.errors import ModelError
from daskserve.models import resolve
from daskserve.workers.loader import load_runner

CONFIG = EngineConfig(dtype="float32", num_threads=1)


def test_models_loaded_at_the_same_time_keep_their_tied_weights() -> None:
    tie_weights = PreTrainedModel.tie_weights
    folders = [resolve(f"tiny-random-{name}") for name in ("gpt2", "gemma2", "opt")] * 3
    with ThreadPoolExecutor(3) as pool:
        runners = list(pool.map(lambda folder: load_runner(folder, CONFIG), folders))
    for runner in runners:
        embedding = runner.model.get_input_embeddings().weight
        assert runner.model.get_output_embeddings().weight is embedding
    assert PreTrainedModel.tie_weights is tie_weights


def test_a_file_that_lacks_weights_is_refused_instead_of_filled_at_random(tmp_path) -> None:
    folder = shutil.copytree(resolve("tiny-random-llama"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no weights for model\.layers\.1\.mlp\.up_proj"):
        load_runner(folder, CONFIG)
