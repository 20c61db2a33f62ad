"""The settings under ``daskserve:`` in Dask's configuration, checked against their models.

``daskserve.yaml`` holds the defaults; a Dask configuration file, ``dask.config.set`` and
environment variables such as ``DASK_DASKSERVE__BATCH__MAX_IN_FLIGHT`` override them.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import dask.config
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from daskserve.errors import ConfigError

_DEFAULTS_FILE = Path(__file__).with_name("daskserve.yaml")


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=_kebab, validate_by_name=False
    )


class BatchSettings(_Section):
    """``daskserve.batch``: how a batch job reads, submits and writes."""

    max_in_flight: int | None = Field(ge=1)
    max_line_bytes: int = Field(ge=1024)
    max_attempts: int = Field(ge=1)
    max_lost_rows: int = Field(ge=1)
    stall_timeout_s: float = Field(gt=0, allow_inf_nan=False)
    sync_interval_s: float = Field(ge=0, allow_inf_nan=False)
    progress_interval_s: float = Field(gt=0, allow_inf_nan=False)


class ServiceSettings(_Section):
    """``daskserve.service``: how instances are fed, waited for and given up."""

    prefill_slots: int = Field(ge=1)
    max_waiting_requests: int = Field(ge=0)
    max_waiting_prompt_tokens: int = Field(ge=1)
    link_silence_s: float = Field(gt=0, allow_inf_nan=False)
    max_attempts: int = Field(ge=1)
    probation_s: float = Field(ge=0, allow_inf_nan=False)
    start_timeout_s: float = Field(gt=0, allow_inf_nan=False)
    no_instance_timeout_s: float = Field(gt=0, allow_inf_nan=False)
    pull_connect_timeout_s: float = Field(gt=0, allow_inf_nan=False)
    pull_stall_timeout_s: float = Field(gt=0, allow_inf_nan=False)
    lease_renewal_s: float = Field(gt=0, allow_inf_nan=False)
    check_dispatch: bool
    protocol: str
    dashboard_address: str | None


class RankSettings(_Section):
    """``daskserve.rank``: which rank of an instance of several workers this worker is."""

    instance: str | None
    number: int = Field(ge=0)
    tensor_parallel: int = Field(ge=1)
    pipeline_parallel: int = Field(ge=1)
    node: int | None = Field(default=None, ge=0)
    gpu: int | None = Field(default=None, ge=0)
    host: str | None = None

    @model_validator(mode="after")
    def _check(self) -> RankSettings:
        count = self.tensor_parallel * self.pipeline_parallel
        if self.number >= count:
            raise ValueError(f"number={self.number} must be below {count}, the number of ranks")
        if self.instance is None and count > 1:
            raise ValueError("instance must name which instance the rank is of")
        return self


class DrainSettings(_Section):
    """``daskserve.drain``: when and how a worker leaves before its time is over."""

    ends_at: float | None = Field(gt=0, allow_inf_nan=False)
    margin_s: float = Field(gt=0, allow_inf_nan=False)
    hand_over_s: float = Field(ge=0, allow_inf_nan=False)
    on_signals: bool

    @model_validator(mode="after")
    def _check(self) -> DrainSettings:
        if self.hand_over_s >= self.margin_s:
            raise ValueError(
                f"hand-over-s={self.hand_over_s:g} must be below margin-s={self.margin_s:g}"
            )
        return self


class ServeSettings(_Section):
    """``daskserve.serve``: what the HTTP server takes in, and for how long."""

    max_in_flight: int | None = Field(ge=1)
    max_in_flight_per_key: int | None = Field(ge=1)
    max_sequences: int = Field(ge=1)
    max_body_bytes: int = Field(ge=1024)
    max_file_bytes: int = Field(ge=1024)
    max_stored_bytes: int = Field(ge=1024)
    keep_files_s: float = Field(gt=0, allow_inf_nan=False)
    max_batch_rows: int = Field(ge=1)
    max_open_batches: int = Field(ge=1)
    batch_max_in_flight: int | None = Field(ge=1)
    max_prompt_chars: int = Field(ge=1)
    max_connections: int = Field(ge=1)
    default_max_tokens: int = Field(ge=1)
    request_timeout_s: float = Field(gt=0, allow_inf_nan=False)
    read_timeout_s: float = Field(gt=0, allow_inf_nan=False)
    write_timeout_s: float = Field(gt=0, allow_inf_nan=False)
    ping_interval_s: float = Field(gt=0, allow_inf_nan=False)
    keep_alive_s: int = Field(ge=1)
    drain_timeout_s: int = Field(ge=0)


class Settings(_Section):
    """Everything under ``daskserve:``; each room takes the narrowest section."""

    batch: BatchSettings
    service: ServiceSettings
    rank: RankSettings
    drain: DrainSettings
    serve: ServeSettings


def settings() -> Settings:
    """The settings as they are now.

    Raises
    ------
    ConfigError
        Names the key, its value and what is allowed; for an unknown key the nearest valid one.
    """
    try:
        return Settings.model_validate(_hyphened(dask.config.get("daskserve")))
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(e) for e in error.errors())) from None


def _hyphened(node: Any) -> Any:
    """Environment variables arrive with underscores; the file uses hyphens."""
    if isinstance(node, dict):
        return {_kebab(str(key)): _hyphened(value) for key, value in node.items()}
    return node


def _explain(error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    name = ".".join(["daskserve", *path])
    if error["type"] == "extra_forbidden":
        return f"{name} is not a setting; {_nearest(path)}"
    if error["type"] == "missing":
        return f"{name} is missing"
    return f"{name}={error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _nearest(path: list[str]) -> str:
    valid = _valid_keys(Settings, "daskserve")
    # All names begin alike, so what they share is not yet a likeness.
    close = difflib.get_close_matches(".".join(["daskserve", *path]), valid, n=1, cutoff=0.7)
    if close:
        return f"did you mean {close[0]}?"
    return f"the settings are {', '.join(valid)}"


def _valid_keys(model: type[BaseModel], prefix: str) -> list[str]:
    keys = []
    for name, info in model.model_fields.items():
        key = f"{prefix}.{_kebab(name)}"
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += _valid_keys(inner, key)
        else:
            keys.append(key)
    return keys


dask.config.update_defaults(yaml.safe_load(_DEFAULTS_FILE.read_text(encoding="utf-8")))
