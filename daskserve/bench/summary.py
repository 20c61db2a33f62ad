"""The figures of a bench: the names and lines of vLLM's ``bench serve``, and attainment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daskserve.bench.record import Record
from daskserve.bench.results import Results
from daskserve.core.slo import SLO

WIDTH = 50
LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
SHARES = {"Median": 0.5, "P90": 0.9, "P99": 0.99}


@dataclass(frozen=True, slots=True)
class Latency:
    """One kind of latency over all answered requests, in ms; NaN where there was none."""

    mean_ms: float
    std_ms: float
    quantiles_ms: tuple[float, ...]

    @classmethod
    def of(cls, values_s: np.ndarray) -> Latency:
        known = values_s[~np.isnan(values_s)].astype(np.float64) * 1e3
        if not len(known):
            return cls(np.nan, np.nan, (np.nan,) * len(SHARES))
        quantiles = np.quantile(known, list(SHARES.values()))
        return cls(float(known.mean()), float(known.std()), tuple(quantiles.tolist()))


@dataclass(frozen=True, slots=True)
class Summary:
    """What ``daskserve bench`` prints.

    Parameters
    ----------
    num_instances
        That served, for the figures per instance.
    goodput
        Answers per second within the SLO; None without one.
    attainment
        Share of all requests sent that met both limits.
    """

    num_ok: int
    num_failed: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    peak_output_tokens_per_s: float
    peak_concurrency: int
    latencies: dict[str, Latency]
    rate: float | None = None
    num_instances: int | None = None
    goodput: float | None = None
    attainment: float | None = None

    @classmethod
    def of(
        cls,
        results: Results,
        slo: SLO | None = None,
        rate: float | None = None,
        num_instances: int | None = None,
    ) -> Summary:
        is_ok, duration_s = results.is_ok, results.duration_s
        met = results.is_met(slo) if slo is not None and len(results) else None
        has_gaps = np.repeat(is_ok, results.values("num_gaps"))
        latencies = {
            name: Latency.of(results.values(f"{name}_s")[is_ok]) for name in ("ttft", "tpot")
        }
        latencies["itl"] = Latency.of(results.values("gap_s")[has_gaps])
        latencies["e2el"] = Latency.of(results.values("e2el_s")[is_ok])
        return cls(
            num_ok=int(is_ok.sum()),
            num_failed=int((~is_ok).sum()),
            duration_s=duration_s,
            prompt_tokens=int(results.values("prompt_tokens")[is_ok].sum()),
            output_tokens=int(results.values("output_tokens")[is_ok].sum()),
            peak_output_tokens_per_s=_peak_token_rate(results),
            peak_concurrency=_peak_concurrency(results),
            latencies=latencies,
            rate=rate,
            num_instances=num_instances,
            goodput=float(met.sum() / duration_s) if met is not None and duration_s else None,
            attainment=float(met.mean()) if met is not None else None,
        )

    def per_s(self, count: float) -> float:
        return count / self.duration_s if self.duration_s else 0.0

    def lines(self) -> list[str]:
        """The table, in the lines of ``vllm bench serve``."""
        rows: list[tuple[str, float | int | None]] = [
            ("Successful requests:", self.num_ok),
            ("Failed requests:", self.num_failed),
            ("Request rate configured (RPS):", self.rate),
            ("Benchmark duration (s):", self.duration_s),
            ("Total input tokens:", self.prompt_tokens),
            ("Total generated tokens:", self.output_tokens),
            ("Request throughput (req/s):", self.per_s(self.num_ok)),
            ("Request goodput (req/s):", self.goodput),
            ("Request goodput per instance (req/s):", self.goodput_per_instance),
            ("SLO attainment (%):", None if self.attainment is None else 100 * self.attainment),
            ("Output token throughput (tok/s):", self.per_s(self.output_tokens)),
            ("Peak output token throughput (tok/s):", self.peak_output_tokens_per_s),
            ("Peak concurrent requests:", self.peak_concurrency),
            (
                "Total token throughput (tok/s):",
                self.per_s(self.prompt_tokens + self.output_tokens),
            ),
        ]
        lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
        lines += [_row(label, value) for label, value in rows if value is not None]
        for name, title in LATENCIES.items():
            lines.append(title.center(WIDTH, "-"))
            latency, short = self.latencies[name], name.upper()
            lines.append(_row(f"Mean {short} (ms):", latency.mean_ms))
            lines.append(_row(f"Std {short} (ms):", latency.std_ms))
            for label, value in zip(SHARES, latency.quantiles_ms, strict=True):
                lines.append(_row(f"{label} {short} (ms):", value))
        return [*lines, "=" * WIDTH]

    @property
    def goodput_per_instance(self) -> float | None:
        if self.goodput is None or not self.num_instances:
            return None
        return self.goodput / self.num_instances


def _row(label: str, value: float | int) -> str:
    shown = str(value) if isinstance(value, int) else "-" if np.isnan(value) else f"{value:.2f}"
    return f"{label:<40} {shown}"


def _peak_concurrency(results: Results) -> int:
    """Most requests at work at any moment; one that ends as another starts is over."""
    starts = np.sort(results.values("sent_s"))
    ends = np.sort(results.values("end_s"))
    running = np.arange(1, len(starts) + 1) - np.searchsorted(ends, starts, side="right")
    return int(running.max(initial=0))


def _peak_token_rate(results: Results) -> float:
    """Most chunks with tokens in a whole second of the run."""
    first_s = results.values("sent_s") + results.values("ttft_s")
    counts = results.values("num_gaps")
    gaps = results.values("gap_s").astype(np.float64)
    # Running sums within each request: subtract what had run up when it began.
    total = np.cumsum(gaps)
    before = np.concatenate([[0.0], total])[np.cumsum(counts) - counts]
    times = np.repeat(first_s - before, counts) + total
    times = np.concatenate([first_s, times])
    times = times[~np.isnan(times)]
    if not len(times):
        return 0.0
    return float(np.bincount((times - times.min()).astype(np.int64)).max())


def failure_lines(records: Sequence[Record]) -> list[str]:
    """How many requests failed in each way, most frequent first, and what was said of the first."""
    failed = [record for record in records if not record.is_ok]
    first = {record.status: record.message for record in reversed(failed)}
    counts = Counter(record.status for record in failed)
    return [
        f"failed: {count} x {kind}" + (f", the first: {first[kind]}" if first[kind] else "")
        for kind, count in counts.most_common()
    ]
