"""Traffic from ServeGen's per-client statistics: rates by window, lengths as histograms."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from daskserve.errors import WorkloadError
from daskserve.planner.workload import Workload

WINDOW_S = 600.0
FIELDS = {"prompt_tokens": "input_tokens", "output_tokens": "output_tokens"}


@dataclass(frozen=True, slots=True)
class _Histogram:
    """Bins by lower edge; a bin reaches up to the next one."""

    edges: np.ndarray
    share: np.ndarray

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        index = generator.choice(len(self.edges), size=count, p=self.share)
        upper = np.append(self.edges[1:], self.edges[-1] + 1)[index]
        # Bins are one token wide up to 256 tokens and 2 % above; gaps are empty bins.
        width = np.minimum(upper - self.edges[index], np.maximum(1.0, 0.02 * self.edges[index]))
        return np.floor(self.edges[index] + generator.random(count) * width)


def read_servegen(
    rates_path: str | Path,
    lengths_path: str | Path,
    start_s: float = 0.0,
    duration_s: float = WINDOW_S,
    seed: int = 0,
) -> Workload:
    """Sample requests of all clients between ``start_s`` and ``start_s + duration_s``.

    As in ServeGen, the gaps of a client are drawn from its gamma or Weibull fit and rescaled to
    the rate of its window. Prompt and output lengths are independent: the source has no joint
    distribution. Clients without length data draw from those with.

    Raises
    ------
    WorkloadError
        Files or columns are missing, or no client sends in that time ("no data").
    """
    if not (math.isfinite(duration_s) and duration_s > 0 and start_s >= 0):
        raise WorkloadError(f"start_s={start_s} and duration_s={duration_s} must be at least 0")
    generator = np.random.default_rng(seed)
    lengths = _histograms(lengths_path)
    clients = sorted({client for client, _ in lengths})
    arrivals, prompts, outputs = [], [], []
    for client, times in _client_arrivals(rates_path, start_s, start_s + duration_s, generator):
        source = client if client in clients else clients[generator.integers(len(clients))]
        arrivals.append(times)
        prompts.append(lengths[source, FIELDS["prompt_tokens"]].draw(len(times), generator))
        outputs.append(lengths[source, FIELDS["output_tokens"]].draw(len(times), generator))
    if not arrivals:
        raise WorkloadError(f"no data: no client sends in {start_s:g}..{start_s + duration_s:g} s")
    arrival = np.concatenate(arrivals)
    order = np.argsort(arrival, kind="stable")
    prompt, output = np.concatenate(prompts)[order], np.concatenate(outputs)[order]
    arrival = arrival[order] - start_s
    name = Path(rates_path).name.split(".")[0]
    return Workload.from_arrays(arrival, np.maximum(prompt, 1), np.maximum(output, 1), name=name)


def _client_arrivals(
    path: str | Path, start_s: float, end_s: float, generator: np.random.Generator
) -> Iterator[tuple[int, np.ndarray]]:
    for row in _table(path, ("client_id", "t_s", "rate", "pattern", "p1", "p2")):
        window = float(row["t_s"])
        low, high = max(window, start_s), min(window + WINDOW_S, end_s)
        rate = float(row["rate"])
        if high <= low or rate <= 0:
            continue
        times = low + _gaps(row, rate, high - low, generator)
        yield int(row["client_id"]), times[times < high]


def _gaps(row: dict, rate: float, span_s: float, generator: np.random.Generator) -> np.ndarray:
    """Arrival times from 0 up to about the span, at the window's rate."""
    shape = float(row["p1"])
    count = generator.poisson(rate * span_s)
    if count == 0:
        return np.empty(0)
    draw = generator.gamma if row["pattern"] == "Gamma" else _weibull(generator)
    gaps = draw(shape, 1.0, count + 1)
    times = np.cumsum(gaps)
    # Exactly the drawn count inside the window: bursts keep their shape, the rate its value.
    return times[:-1] / times[-1] * span_s


def _weibull(generator: np.random.Generator) -> Callable[[float, float, int], np.ndarray]:
    return lambda shape, scale, size: scale * generator.weibull(shape, size)


def _histograms(path: str | Path) -> dict[tuple[int, str], _Histogram]:
    collected: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for row in _table(path, ("client_id", "field", "tokens_lo", "prob")):
        if row["field"] in FIELDS.values():
            key = (int(row["client_id"]), row["field"])
            collected.setdefault(key, []).append((float(row["tokens_lo"]), float(row["prob"])))
    complete = {
        client
        for client, _ in collected
        if all((client, field) in collected for field in FIELDS.values())
    }
    if not complete:
        raise WorkloadError(f"no data: {path} has no client with both length histograms")
    found = {}
    for key, bins in collected.items():
        if key[0] in complete:
            edges, share = np.array(sorted(bins)).T
            found[key] = _Histogram(edges, share / share.sum())
    return found


def _table(path: str | Path, columns: tuple[str, ...]) -> list[dict]:
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except OSError as error:
        raise WorkloadError(f"cannot read {path}: {error.strerror or error}") from error
    if not rows:
        raise WorkloadError(f"no data: {path} holds no rows")
    missing = [name for name in columns if name not in rows[0]]
    if missing:
        raise WorkloadError(f"{path} has no column {', '.join(missing)}: not a ServeGen file")
    return rows
