"""Reads request traces: Azure, Mooncake, DistServe's workloads, plain CSV or JSONL, own benches."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import xarray as xr

from daskserve.errors import WorkloadError
from daskserve.planner.workload import Workload

PROMPT_NAMES = ("prompt_tokens", "ContextTokens", "input_length", "prompt_len",
                "num_prefill_tokens", "input_tokens", "isl")  # fmt: skip
OUTPUT_NAMES = ("output_tokens", "GeneratedTokens", "output_length", "output_len",
                "num_decode_tokens", "osl")  # fmt: skip
TIME_UNITS = {
    "arrival_s": 1.0,
    "arrived_at": 1.0,
    "arrival_s_at_unit_rate": 1.0,
    "timestamp": 1e-3,
    "arrival_ms": 1e-3,
}
"""Names of the arrival column and their unit in seconds; Mooncake's ``timestamp`` is in ms."""
CLOCK_NAME = "TIMESTAMP"
MOONCAKE_BLOCK_TOKENS = 512
CLASS_NAME = "slo_class"
QUANTISED_SHARE = 0.5
"""When more gaps than this are zero, arrivals were rounded to a coarse clock."""


def read_workload(path: str | Path, spread_s: float | None = None, seed: int = 0) -> Workload:
    """Read a trace; the format follows from its columns, gzip from its name.

    Parameters
    ----------
    path
        CSV or JSONL (``.jsonl``), with a prompt and an output column and, unless only lengths
        are known, an arrival column; a column ``slo_class`` names the class of each request; or
        NetCDF (``.nc``) that ``daskserve bench`` wrote.
    spread_s
        Seconds over which requests of equal time stamps are spread, evenly at random. None
        finds out whether the stamps were rounded (Mooncake's conversation trace: 3 s) and
        spreads only then; 0 leaves them.
    seed
        Of the spreading.

    Raises
    ------
    WorkloadError
        No such file, no rows, missing columns, bad numbers, a class without a name, or arrivals
        out of order.
    """
    rows = list(_rows(Path(path)))
    if not rows:
        raise WorkloadError(f"no data: {path} holds no requests")
    first = rows[0][1]
    prompt = _integers(path, rows, _pick(path, first, PROMPT_NAMES, "prompt lengths"))
    output = _integers(path, rows, _pick(path, first, OUTPUT_NAMES, "output lengths"))
    arrival = _arrivals(path, rows)
    name = Path(path).name.split(".")[0]
    if spread_s is not None and not (math.isfinite(spread_s) and spread_s >= 0):
        raise WorkloadError(f"spread_s={spread_s} must be a finite number of seconds of at least 0")
    classes = _classes(path, rows) if CLASS_NAME in first else None
    workload = Workload.from_arrays(arrival, prompt, output, classes, name=name)
    has_times = bool(workload.rate)
    if has_times:
        arrival = spread(arrival, spread_s, seed)
        workload = Workload(workload.dataset.assign(arrival_s=("request", arrival)))
    if "hash_ids" in first:
        workload = _with_prefix_blocks(workload, rows)
    return workload


def spread(arrival_s: np.ndarray, spread_s: float | None = None, seed: int = 0) -> np.ndarray:
    """Spread requests that share a time stamp over the seconds that follow it."""
    gaps = np.diff(arrival_s)
    if spread_s is None:
        is_quantised = len(gaps) > 0 and (gaps == 0).mean() > QUANTISED_SHARE
        spread_s = float(np.median(gaps[gaps > 0])) if is_quantised and gaps.any() else 0.0
    if spread_s == 0:
        return arrival_s
    stamps, first, counts = np.unique(arrival_s, return_index=True, return_counts=True)
    # Never past the next stamp, so that the order of the trace is kept.
    room = np.minimum(np.append(np.diff(stamps), spread_s), spread_s)
    offsets = np.random.default_rng(seed).random(len(arrival_s)) * np.repeat(room, counts)
    spread_out = arrival_s + offsets
    for start, count in zip(first, counts, strict=True):
        spread_out[start : start + count].sort()
    return spread_out


def _rows(path: Path) -> Iterator[tuple[int, dict]]:
    """``(line number, row)`` of a CSV or JSONL file, or ``(number, row)`` of a bench's requests."""
    if path.name.endswith(".nc"):
        yield from enumerate(_requests_of_bench(path), start=1)
        return
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise WorkloadError(f"cannot read {path}: {error.strerror or error}") from error
    name = path.name
    if name.endswith(".gz"):
        raw, name = gzip.decompress(raw), name.removesuffix(".gz")
    text = raw.decode("utf-8")
    if not name.endswith((".jsonl", ".json")):
        yield from enumerate(csv.DictReader(io.StringIO(text)), start=2)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise WorkloadError(f"{path} line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise WorkloadError(f"{path} line {number} must be an object, not {line[:40]!r}")
        yield number, row


def _requests_of_bench(path: Path) -> Iterator[dict]:
    """One that failed counts with the length it asked for; one of unknown prompt is left out."""
    try:
        bench = xr.load_dataset(path, engine="scipy")
        is_ok, prompt = bench["status"].values == "ok", bench["prompt_tokens"].values
        output = np.where(is_ok, bench["output_tokens"].values, bench["max_tokens"].values)
        arrival = bench["arrival_s"].values
    except (OSError, TypeError, ValueError, KeyError) as error:
        raise WorkloadError(f"{path} was not written by daskserve bench: {error}") from error
    for index in np.flatnonzero((prompt > 0) & (output > 0)).tolist():
        yield {
            "arrival_s": arrival[index],
            "prompt_tokens": int(prompt[index]),
            "output_tokens": int(output[index]),
        }


def _pick(path: str | Path, row: dict, names: tuple[str, ...], what: str) -> str:
    for name in names:
        if name in row:
            return name
    raise WorkloadError(
        f"{path} has no column for {what}: name it {names[0]}; it has {', '.join(map(str, row))}"
    )


def _numbers(path: str | Path, rows: list, column: str) -> np.ndarray:
    values = np.empty(len(rows))
    for index, (line, row) in enumerate(rows):
        text = row.get(column)
        # DistServe's own files print numpy scalars.
        match = re.fullmatch(r"np\.float64\((.*)\)", text) if isinstance(text, str) else None
        try:
            values[index] = float(match.group(1) if match else text)
        except (TypeError, ValueError):
            values[index] = math.nan
        if not math.isfinite(values[index]):
            raise WorkloadError(f"{path} line {line}: {column}={text!r} is not a number")
    return values


def _integers(path: str | Path, rows: list, column: str) -> np.ndarray:
    values = _numbers(path, rows, column)
    wrong = (values < 1) | (values != np.floor(values))
    if wrong.any():
        index = int(np.argmax(wrong))
        line, row = rows[index]
        raise WorkloadError(
            f"{path} line {line}: {column}={row[column]} must be a whole number of at least 1"
        )
    return values


def _classes(path: str | Path, rows: list) -> list[str]:
    for line, row in rows:
        name = row.get(CLASS_NAME)
        if not isinstance(name, str) or not name.strip():
            raise WorkloadError(f"{path} line {line}: {CLASS_NAME}={name!r} must be a name")
    return [row[CLASS_NAME].strip() for _, row in rows]


def _arrivals(path: str | Path, rows: list) -> np.ndarray:
    """Seconds from the first arrival; all 0 when the file has lengths only."""
    first = rows[0][1]
    if CLOCK_NAME in first:
        try:
            stamps = np.array([row[CLOCK_NAME] for _, row in rows], dtype="datetime64[ns]")
        except ValueError as error:
            raise WorkloadError(f"{path}: {CLOCK_NAME} is not a date and time: {error}") from error
        arrival = (stamps - stamps[0]) / np.timedelta64(1, "s")
    else:
        column = next((name for name in TIME_UNITS if name in first), None)
        if column is None:
            return np.zeros(len(rows))
        arrival = _numbers(path, rows, column) * TIME_UNITS[column]
        arrival = arrival - arrival[0]
    steps = np.diff(arrival)
    if (steps < 0).any():
        line = rows[int(np.argmax(steps < 0)) + 1][0]
        raise WorkloadError(f"{path} line {line}: arrives before the line above; sort by time")
    return arrival


def _with_prefix_blocks(workload: Workload, rows: list) -> Workload:
    lists = [row.get("hash_ids") or [] for _, row in rows]
    counts = np.array([len(ids) for ids in lists], dtype=np.int64)
    flat = np.array([block for ids in lists for block in ids], dtype=np.int64)
    dataset = workload.dataset.assign(
        num_prefix_blocks=("request", counts), prefix_block_id=("prefix_block", flat)
    )
    return replace(
        workload, dataset=dataset.assign_attrs(prefix_block_tokens=MOONCAKE_BLOCK_TOKENS)
    )


def reusable_prompt_share(workload: Workload) -> float | None:
    """Share of prompt tokens that an unlimited prefix cache would save; None without blocks."""
    data: xr.Dataset = workload.dataset
    if "prefix_block_id" not in data or len(workload) == 0:
        return None
    block_tokens = data.attrs["prefix_block_tokens"]
    seen: set[int] = set()
    saved = 0
    ends = np.cumsum(data["num_prefix_blocks"].values)
    blocks = data["prefix_block_id"].values
    start = 0
    for end, prompt in zip(ends, data["prompt_tokens"].values, strict=True):
        mine = blocks[start:end].tolist()
        hits = next((i for i, block in enumerate(mine) if block not in seen), len(mine))
        saved += min(hits * block_tokens, int(prompt))
        seen.update(mine)
        start = end
    return saved / float(data["prompt_tokens"].sum())
