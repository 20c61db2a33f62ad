"""From a model's name to a checked directory with its weights and tokenizer."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from daskserve.errors import ModelError
from daskserve.models import hub, smollm2, tiny_random
from daskserve.models.checks import check_model_dir

DEFAULT_MODEL = smollm2.NAME
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(name: str) -> Path:
    """The directory of a model, fetched or built first if it is not in the cache.

    Parameters
    ----------
    name
        ``smollm2-135m``, a local directory, a Hub id (``owner/name``),
        ``tiny-random-<architecture>`` (fixed seed, for tests), or ``mock`` (tokenizer only).

    Returns
    -------
    Path
        A directory with ``config.json``, ``tokenizer.json`` and, except for ``mock``,
        ``*.safetensors``.

    Raises
    ------
    ModelError
        Unknown name, failed download, or a directory that daskserve will not load.
    """
    if name == smollm2.NAME:
        return smollm2.fetch()
    if name == tiny_random.MOCK or name.startswith(tiny_random.PREFIX):
        return tiny_random.build(name)
    local = os.path.expanduser(name)
    if os.path.isdir(local):  # False, not an exception, for names that cannot be paths
        check_model_dir(Path(local))
        return Path(local).resolve()
    if _HUB_ID.fullmatch(name):
        path = hub.download(name)
        check_model_dir(path)
        return path
    raise ModelError(_unknown(name))


def _unknown(name: str) -> str:
    known = [smollm2.NAME, tiny_random.MOCK, *tiny_random.names()]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return (
        f"no model {name!r}{hint} Use {smollm2.NAME}, an existing directory, a Hub id like "
        f"owner/name, {tiny_random.MOCK}, or {tiny_random.PREFIX}<architecture>"
    )
