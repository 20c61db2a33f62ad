"""The few facts of a model directory that are needed without loading the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daskserve.errors import ModelError

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What ``config.json`` and ``generation_config.json`` say.

    Parameters
    ----------
    model_type
        The transformers architecture, such as ``llama``.
    vocab_size
        Rows of the embedding; may be larger than the tokenizer's vocabulary.
    context_tokens
        Most tokens in one sequence.
    eos_token_ids
        Tokens that end an answer, as ``generate`` reads them: the generation configuration
        first, else the model's own.
    """

    model_type: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: frozenset[int]

    @classmethod
    def load(cls, model_dir: Path) -> ModelConfig:
        """Raises ModelError when a needed fact is missing."""
        whole = read_json(model_dir / "config.json")
        text = whole.get("text_config") or whole
        context = next((text[key] for key in _CONTEXT_KEYS if text.get(key)), None)
        context_tokens = _whole_number(model_dir, _CONTEXT_KEYS[0], context)
        vocab = text.get("vocab_size", whole.get("vocab_size"))
        vocab_size = _whole_number(model_dir, "vocab_size", vocab)
        generation = read_json(model_dir / "generation_config.json", missing_is_empty=True)
        eos = generation.get("eos_token_id")
        if eos is None:
            eos = text.get("eos_token_id", whole.get("eos_token_id"))
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        model_type = str(text.get("model_type", whole.get("model_type", "")))
        return cls(model_type, vocab_size, context_tokens, frozenset(ids))


def _whole_number(model_dir: Path, field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{model_dir}/config.json has no usable {field}: {value!r}")
    return value


def read_json(path: Path, missing_is_empty: bool = False) -> dict[str, Any]:
    """The object in a JSON file of a model directory; ModelError when it is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if missing_is_empty:
            return {}
        raise ModelError(f"{path} is missing: not a model directory") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content
