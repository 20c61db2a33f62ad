"""Models from the Hugging Face Hub: configuration, tokenizer and safetensors, never code."""

from __future__ import annotations

import shutil
from pathlib import Path

from daskserve.errors import ModelError
from daskserve.models.checks import check_model_dir

_WANTED = ["*.json", "*.jinja", "*.safetensors"]
# The same weights again, for other programs.
_NOT_WANTED = ["*/*", "consolidated*"]


def download(repo_id: str) -> Path:
    """The snapshot of ``repo_id`` in the Hub's own cache; ModelError when it cannot be had."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=_WANTED, ignore_patterns=_NOT_WANTED))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{repo_id} could not be fetched from the Hub: {reason[:300].rstrip('.')}. "
            "Check the name and the connection, or give a local directory."
        ) from error


def copy(repo_id: str, target: Path) -> None:
    """Put the files of ``repo_id`` into the folder ``target``."""
    snapshot = download(repo_id)
    check_model_dir(snapshot)
    shutil.copytree(snapshot, target, dirs_exist_ok=True)
