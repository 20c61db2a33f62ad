"""What a model directory must and must not hold: weights without pickle, and no code."""

from __future__ import annotations

from pathlib import Path

from daskserve.errors import ModelError
from daskserve.models.config import read_json


def check_model_dir(path: Path) -> None:
    """Refuse a directory that lacks a part or that wants its own code run (ModelError)."""
    read_json(path / "config.json")
    for file_name in ("config.json", "tokenizer_config.json"):
        if "auto_map" in read_json(path / file_name, missing_is_empty=True):
            raise ModelError(
                f"{path}/{file_name} names code to run (auto_map); daskserve runs no code from "
                "model folders: use a model whose architecture transformers itself has"
            )
    scripts = sorted(file.name for file in path.glob("*.py"))
    if scripts:
        raise ModelError(
            f"{path} holds Python code ({', '.join(scripts[:3])}); daskserve runs no code from "
            "model folders: remove it"
        )
    if not any(path.glob("*.safetensors")):
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pt"))
        found = "only pickled weights" if pickled else "no weights"
        raise ModelError(
            f"{path} has {found}: safetensors is needed (pickled files can run code); "
            "save the model once with transformers' save_pretrained"
        )
    if not (path / "tokenizer.json").is_file():
        raise ModelError(
            f"{path} has no tokenizer.json; save the tokenizer once with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
