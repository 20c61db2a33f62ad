import json

import pytest

from daskserve.models import ModelConfig, resolve, tiny_random
from daskserve.models.byte_tokenizer import END_OF_TURN_ID, VOCAB_SIZE
from daskserve.text import Tokenizer


def test_a_model_built_twice_has_the_same_weights(tmp_path, monkeypatch):
    first = resolve("tiny-random-llama") / "model.safetensors"
    monkeypatch.setenv("DASKSERVE_CACHE", str(tmp_path))
    second = resolve("tiny-random-llama") / "model.safetensors"
    assert tmp_path in second.parents
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("architecture", tiny_random.ARCHITECTURES)
def test_every_family_can_be_built(architecture):
    folder = resolve(f"tiny-random-{architecture}")
    config = ModelConfig.load(folder)
    assert (config.vocab_size, config.eos_token_ids) == (VOCAB_SIZE, {END_OF_TURN_ID})
    assert (folder / "model.safetensors").stat().st_size < 2_000_000


def test_grouped_query_heads_are_those_that_tensor_parallelism_needs():
    config = json.loads((resolve("tiny-random-llama") / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 4)


def test_the_byte_tokenizer_gives_every_text_back():
    tokenizer = Tokenizer.load(resolve("mock"))
    text = "".join(map(chr, range(1, 0x800))) + "日本語 🇫🇷"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocab_size, tokenizer.context_tokens) == (VOCAB_SIZE, 8192)
