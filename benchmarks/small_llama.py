"""A Llama of 48 million random weights, for hours of runs on machines where SmolLM2 is slow.

What a step takes does not depend on what the weights are, so a model that nobody trained shows as
well as any other whether the simulator is right.

    python benchmarks/small_llama.py FOLDER      # then: daskserve calibrate --model FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from daskserve.models import byte_tokenizer
from daskserve.models.engine_packages import no_progress_bars

SHAPE = LlamaConfig(
    vocab_size=byte_tokenizer.VOCAB_SIZE,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=16,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=2048,
    bos_token_id=None,
    eos_token_id=byte_tokenizer.END_OF_TURN_ID,
    pad_token_id=byte_tokenizer.PAD_ID,
)


def write(folder: Path) -> int:
    """Model and tokenizer, with a fixed seed; returns the number of parameters."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE)
    with no_progress_bars():
        model.save_pretrained(folder)
    byte_tokenizer.write(folder)
    return model.num_parameters()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print(f"{write(folder) / 1e6:.0f} M parameters in {folder}")


if __name__ == "__main__":
    main()
