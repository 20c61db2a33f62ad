"""The profile file that ``daskserve calibrate`` writes: what was measured, fitted and judged.

JSON with a schema version and units in the names; read strictly.
"""

from __future__ import annotations

import difflib
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from daskserve.errors import ConfigError
from daskserve.planner.hardware import GPU
from daskserve.planner.latency.calibrated import CalibratedModel
from daskserve.planner.latency.paper import PaperCoefficients
from daskserve.planner.model_spec import ModelSpec

SCHEMA_VERSION = 6

Phase = Literal["prefill", "decode"]

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class MachineFacts(_Strict):
    """Where it was measured, and with which versions."""

    cpu: str
    num_cores: Count
    memory_bytes: Count
    system: str
    versions: dict[str, str]


class EngineFacts(_Strict):
    """What was measured."""

    model: str
    dtype: str
    num_threads: Count
    block_size: Count
    prefill_budget_tokens: Count
    max_batch_size: Count


class HardwareFacts(_Strict):
    """Limits that no fitted time may beat: the most that anything reached here."""

    name: str
    memory_bytes: Positive
    flops_per_s: Positive
    memory_bytes_per_s: Positive
    link_bytes_per_s: Positive


class Fitted(_Strict):
    """A coefficient with its bootstrap 90 % interval."""

    value: NotNegative
    low: NotNegative
    high: NotNegative


class Growth(Fitted):
    """What a decode step of ``batch`` requests takes longer than one of the smallest batch."""

    batch: Count


class Coefficients(_Strict):
    """See ``PaperCoefficients``."""

    c1_s_per_weight_token: Fitted
    c2_s_per_attention_token_squared: Fitted
    c3_s: Fitted
    per_prompt_s: Fitted
    c4_s_per_weight: Fitted
    c5_s_per_attention_token: Fitted
    growth_s_per_weight: list[Growth]

    def values(self) -> PaperCoefficients:
        return PaperCoefficients(
            self.c1_s_per_weight_token.value,
            self.c2_s_per_attention_token_squared.value,
            self.c3_s.value,
            self.c4_s_per_weight.value,
            self.c5_s_per_attention_token.value,
            tuple((one.batch, one.value) for one in self.growth_s_per_weight),
            self.per_prompt_s.value,
        )


class Measurement(_Strict):
    """Median of repeats and their spread (interquartile range)."""

    median_s: NotNegative
    spread_s: NotNegative
    num_repeats: Count


class StepPoint(Measurement):
    """``batch`` prompts of ``tokens`` each, or requests with contexts of ``tokens``."""

    phase: Phase
    batch: Count
    tokens: Count
    predicted_s: NotNegative
    is_held_out: bool

    @property
    def error(self) -> float:
        """``predicted / measured - 1``."""
        return self.predicted_s / self.median_s - 1.0 if self.median_s else 0.0


class TransferPoint(Measurement):
    kv_bytes: Count


class PhaseError(_Strict):
    """Relative errors at the points that the fit did not see."""

    num_fitted: Count
    num_held_out: Count
    median: NotNegative
    p90: NotNegative
    limit: Positive
    paper_median: NotNegative
    """The same median for the paper's form as printed, without growth."""


class Overheads(_Strict):
    """What a service adds to the steps, of which it makes one at a time; see ``CalibratedModel``.

    ``is_colocated`` says of what kind of service: an instance with all cores is alone on them.
    """

    is_colocated: bool
    dispatch: Measurement
    hand_over: Measurement
    prefill_extra: Measurement
    prefill_extra_per_token_s: NotNegative
    decode_extra: Measurement
    decode_extra_per_request_s: NotNegative
    kv_latency_s: NotNegative


class Slowdown(_Strict):
    """What a step takes longer in traffic, as a share: mean of rounds, and their quartiles' range.

    Means, not medians: what the machine does besides now and then is part of its pace.
    """

    mean: Annotated[float, Field(gt=-1)]
    spread: NotNegative
    num_repeats: Count


class Sharing(_Strict):
    """What a prefill and a decode instance cost each other that compute at the same time.

    Of a colocated instance, what its steps take longer in mixed traffic, or less than that of them
    which was timed alone. Before that share ``prefill_added_s`` comes to every prefill step: the
    cores receive requests meanwhile; and ``prefill_following_s`` to one that begins as another
    ends: they give away the KV of that one.
    """

    prefill: Slowdown
    decode: Slowdown
    prefill_added_s: NotNegative
    prefill_following_s: NotNegative


class Calibration(_Strict):
    """Everything in a profile file."""

    schema_version: Literal[6]
    is_trusted: bool
    why_not: list[str]
    measured_at: str
    machine: MachineFacts
    engine: EngineFacts
    model: Annotated[ModelSpec, BeforeValidator(lambda value: _known(value))]
    hardware: HardwareFacts
    coefficients: Coefficients
    errors: dict[Phase, PhaseError]
    steps: list[StepPoint]
    kv_transfers: list[TransferPoint]
    overheads: Overheads
    sharing: Sharing | None
    """None where no mixed traffic could be measured."""

    def latency(self) -> CalibratedModel:
        """What the planner reads."""
        hardware, added, sharing = self.hardware, self.overheads, self.sharing
        return CalibratedModel(
            model=self.model,
            hardware=GPU(
                hardware.name,
                hardware.memory_bytes,
                hardware.flops_per_s,
                hardware.memory_bytes_per_s,
                hardware.link_bytes_per_s,
                price_per_hour=0.0,
            ),
            coefficients=self.coefficients.values(),
            prefill_budget_tokens=self.engine.prefill_budget_tokens,
            max_batch_size=self.engine.max_batch_size,
            dispatch_s=added.dispatch.median_s,
            hand_over_s=added.hand_over.median_s + added.kv_latency_s,
            prefill_extra_s=added.prefill_extra.median_s
            + (sharing.prefill_added_s if sharing else 0.0),
            prefill_extra_per_token_s=added.prefill_extra_per_token_s,
            decode_extra_s=added.decode_extra.median_s,
            decode_extra_per_request_s=added.decode_extra_per_request_s,
            prefill_following_s=sharing.prefill_following_s if sharing else 0.0,
            prefill_slowdown=sharing.prefill.mean if sharing else 0.0,
            decode_slowdown=sharing.decode.mean if sharing else 0.0,
            is_colocated=added.is_colocated,
        )

    def write(self, path: str | Path) -> None:
        """Raises ConfigError when it cannot be written."""
        try:
            Path(path).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def read_calibration(path: str | Path, allow_untrusted: bool = False) -> Calibration:
    """Read a profile file.

    Raises
    ------
    ConfigError
        Not readable, another schema version, a field that is missing, unknown or of the wrong
        kind (it is named); or a profile that is not trusted, unless ``allow_untrusted``.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        found = Calibration.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_problem(error)}") from error
    missing = {"prefill", "decode"} - set(found.errors)
    if missing:
        raise ConfigError(f"{path}: errors.{missing.pop()}: Field required")
    if not found.is_trusted and not allow_untrusted:
        raise ConfigError(
            f"{path} is not trusted: {'; '.join(found.why_not)}. Calibrate again on a quiet"
            " machine, or give --allow-untrusted"
        )
    return found


def _known(value: Any) -> Any:
    """Dataclasses would pass over keys that they do not know."""
    if isinstance(value, dict):
        names = [item.name for item in fields(ModelSpec)]
        for key in value:
            if key not in names:
                raise ValueError(f"{key} is not a key" + _near(key, names))
    return value


def _near(key: str, names: list[str]) -> str:
    near = difflib.get_close_matches(key, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


_ALL = (Calibration, MachineFacts, EngineFacts, HardwareFacts, Fitted, Growth, Coefficients,
        StepPoint, TransferPoint, PhaseError, Overheads, Slowdown, Sharing)  # fmt: skip


def _first_problem(error: ValidationError) -> str:
    # Another version explains everything else, an unknown key a missing one.
    order = {"literal_error": 0, "extra_forbidden": 1}
    problem = min(error.errors(), key=lambda one: order.get(one["type"], 2))
    where = ".".join(str(part) for part in problem["loc"])
    if where == "schema_version":
        return f"schema_version={problem['input']!r}; this reads version {SCHEMA_VERSION}"
    if problem["type"] != "extra_forbidden":
        return f"{where}: {problem['msg']}" if where else problem["msg"]
    names = [name for model in _ALL for name in model.model_fields]
    return f"{where} is not a key" + _near(str(problem["loc"][-1]), names)
