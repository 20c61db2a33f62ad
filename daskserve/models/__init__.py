"""Where a model name leads: the embedded default, local directories, the Hub, random test models.

``resolve`` turns the name of ``EngineConfig.model`` into a directory before anything is loaded;
nothing here imports torch unless a model has to be built or converted first.
"""

from __future__ import annotations

from daskserve.models.cache import cache_dir
from daskserve.models.catalog import DEFAULT_MODEL, resolve
from daskserve.models.config import ModelConfig

__all__ = ["DEFAULT_MODEL", "ModelConfig", "cache_dir", "resolve"]
