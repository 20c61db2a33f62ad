"""One row of what a service has done in the last seconds: what dashboards draw and record."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from daskserve.core.instance import Role
from daskserve.core.slo import SLO


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of the requests in the window; None without any."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class InstanceSample:
    """One instance in one row.

    Parameters
    ----------
    kv_share
        Used share of its KV pages, 0..1.
    tokens_per_s
        Prompt and output tokens that it computed.
    """

    name: str
    address: str
    role: str
    state: str
    host: str = ""
    device: str = "cpu"
    tp: int = 1
    pp: int = 1
    num_waiting: int = 0
    num_running: int = 0
    num_holding: int = 0
    kv_share: float = 0.0
    tokens_per_s: float = 0.0
    error: str = ""

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class Sample:
    """A service over the last ``window_s`` seconds.

    Parameters
    ----------
    at
        Seconds since 1970.
    arrived_per_s, finished_per_s
        Requests.
    attainment
        Share of the finished ones within both limits of the SLO; None without an SLO or requests.
    goodput_per_gpu
        Requests/s within both limits, per GPU that an instance occupies; None without an SLO.
    prompt_tokens_per_s, output_tokens_per_s
        Of the finished requests.
    waiting
        Requests by what they wait for: ``prefill``, ``decode`` (room on a decode instance) and
        ``transfer`` (their KV is being pulled); on colocated instances only ``prefill``.
    """

    at: float
    window_s: float
    model: str = ""
    slo: SLO | None = None
    arrived_per_s: float = 0.0
    finished_per_s: float = 0.0
    failed_per_s: float = 0.0
    attainment: float | None = None
    goodput_per_gpu: float | None = None
    prompt_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    ttft_s: Percentiles = Percentiles()
    tpot_s: Percentiles = Percentiles()
    waiting: dict[str, int] = field(default_factory=dict)
    num_running: int = 0
    instances: tuple[InstanceSample, ...] = ()

    @property
    def num_gpus(self) -> int:
        return sum(one.num_gpus for one in self.instances)

    def gpus_of(self, role: Role) -> int:
        return sum(one.num_gpus for one in self.instances if one.role == role.value)

    def cost_per_million_tokens(self, price_per_gpu_hour: float) -> float | None:
        """Dollars for a million prompt and output tokens; None while there are none."""
        tokens_per_s = self.prompt_tokens_per_s + self.output_tokens_per_s
        if tokens_per_s == 0:
            return None
        return self.num_gpus * price_per_gpu_hour / 3600 / tokens_per_s * 1e6

    def to_record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Sample:
        """Inverse of `to_record`; KeyError and TypeError for anything else."""
        known = {name: record[name] for name in (f.name for f in fields(cls))}
        known["slo"] = SLO(**known["slo"]) if known["slo"] else None
        for name in ("ttft_s", "tpot_s"):
            known[name] = Percentiles(**known[name])
        known["instances"] = tuple(InstanceSample(**one) for one in known["instances"])
        return cls(**known)
