"""What the original search chooses between: one disaggregated or colocated pair of degrees."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

from daskserve.errors import ConfigError
from daskserve.planner.distserve.profile import DISTSERVE, VLLM, ModelProfile, StepCoefficients


def _check_degrees(configuration: Disaggregated | Colocated) -> None:
    for field, value in zip(fields(configuration), astuple(configuration), strict=True):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{field.name}={value!r} must be a whole number of at least 1")


@dataclass(frozen=True, slots=True, order=True)
class Disaggregated:
    """One prefill and one decode instance, cut into ``pp_cross`` segments of one node each.

    ``pp_prefill`` and ``pp_decode`` count the stages inside a segment, as in the original, so
    an instance has ``pp_cross`` times as many.
    """

    pp_cross: int
    tp_prefill: int
    pp_prefill: int
    tp_decode: int
    pp_decode: int

    backend = DISTSERVE

    def __post_init__(self) -> None:
        _check_degrees(self)

    @property
    def prefill(self) -> tuple[int, int]:
        """(TP, PP) of the whole prefill instance."""
        return self.tp_prefill, self.pp_cross * self.pp_prefill

    @property
    def decode(self) -> tuple[int, int]:
        """(TP, PP) of the whole decode instance."""
        return self.tp_decode, self.pp_cross * self.pp_decode

    @property
    def num_gpus(self) -> int:
        return self.pp_cross * (self.tp_prefill * self.pp_prefill + self.tp_decode * self.pp_decode)


@dataclass(frozen=True, slots=True, order=True)
class Colocated:
    """One instance that does both phases, prefill first: vLLM as the paper compares with it."""

    tp: int
    pp: int

    backend = VLLM

    def __post_init__(self) -> None:
        _check_degrees(self)

    @property
    def prefill(self) -> tuple[int, int]:
        """(TP, PP), the same for both phases."""
        return self.tp, self.pp

    @property
    def decode(self) -> tuple[int, int]:
        """(TP, PP), the same for both phases."""
        return self.tp, self.pp

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp


Configuration = Disaggregated | Colocated


def why_not_runnable(profile: ModelProfile, configuration: Configuration) -> str | None:
    """The reason why the published data cannot run a configuration; None when they can."""
    rows = profile.coefficients[configuration.backend]
    for phase, (tp, pp) in (("prefill", configuration.prefill), ("decode", configuration.decode)):
        if (tp, pp) not in profile.kv_capacity_tokens:
            return f"{phase} TP={tp} PP={pp}: no KV capacity is published"
        if tp not in rows:
            return f"{phase} TP={tp}: no {configuration.backend} step times are published"
    return None


def phase_coefficients(
    profile: ModelProfile, configuration: Configuration
) -> tuple[StepCoefficients, StepCoefficients]:
    """Coefficients of the prefill and of the decode phase.

    Raises
    ------
    ConfigError
        The configuration cannot run.
    """
    reason = why_not_runnable(profile, configuration)
    if reason:
        raise ConfigError(f"{profile.name} cannot run as {configuration}: {reason}")
    rows = profile.coefficients[configuration.backend]
    return rows[configuration.prefill[0]], rows[configuration.decode[0]]
