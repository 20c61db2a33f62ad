"""Measures L_m, the prompt tokens of a step beyond which prefill gains no throughput.

DistServe batches prompts up to L_m and runs longer ones alone (section 4.3). It depends on the
model, its type, the processor and the threads, so it is measured once and kept in the cache
folder; engines without an explicit ``prefill_budget_tokens`` look it up there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from daskserve.core.instance import EngineConfig
from daskserve.core.kv import blocks_for
from daskserve.errors import ConfigError, ModelError
from daskserve.models.cache import cache_dir
from daskserve.models.catalog import resolve
from daskserve.workers.forward import ForwardBatch, Runner
from daskserve.workers.kv_pool import KVPool

logger = logging.getLogger(__name__)

KNEE_SHARE = 0.95
"""L_m is the smallest step that reaches this share of the best throughput."""

BATCHED_PROMPT_TOKENS = 128
"""Length of the prompts that make up a batched step."""

STEP_TOKENS = (32, 64, 128, 256, 512, 1024, 2048)
_ROUNDS, _ROUND_S = 4, 0.03


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One measured prefill step: ``num_prompts`` prompts of ``prompt_tokens``, in ``step_s``."""

    num_prompts: int
    prompt_tokens: int
    step_s: float

    @property
    def num_tokens(self) -> int:
        return self.num_prompts * self.prompt_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s


@dataclass(frozen=True, slots=True)
class Machine:
    """What a profile is valid for."""

    model: str
    dtype: str
    num_threads: int
    cpu: str

    @classmethod
    def of(cls, config: EngineConfig) -> Machine:
        num_threads = config.num_threads or len(os.sched_getaffinity(0))
        return cls(config.model, config.dtype, num_threads, _cpu_name())

    @property
    def path(self) -> Path:
        """Where its profile is kept."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        return cache_dir() / "profiles" / f"prefill-{digest}.json"


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """Prefill throughput by step size, and what follows for batching."""

    machine: Machine
    points: tuple[PrefillPoint, ...]

    @property
    def budget_tokens(self) -> int:
        """L_m."""
        return knee(self.points)

    def table(self) -> str:
        """For people: one line per step size, the chosen one marked."""
        machine = self.machine
        lines = [
            f"{machine.model} {machine.dtype}, {machine.num_threads} threads, {machine.cpu}",
            f"{'step tokens':>11}  {'alone tok/s':>11}  "
            f"{f'in prompts of {BATCHED_PROMPT_TOKENS}, tok/s':>27}",
        ]
        for size in sorted({point.num_tokens for point in self.points}):
            here = [point for point in self.points if point.num_tokens == size]
            alone = [p.tokens_per_s for p in here if p.num_prompts == 1]
            batched = [p.tokens_per_s for p in here if p.prompt_tokens <= BATCHED_PROMPT_TOKENS]
            cells = [f"{values[0]:.0f}" if values else "-" for values in (alone, batched)]
            mark = "  <- L_m" if size == self.budget_tokens else ""
            lines.append(f"{size:>11}  {cells[0]:>11}  {cells[1]:>27}{mark}")
        return "\n".join(lines)


def knee(points: Sequence[PrefillPoint], share: float = KNEE_SHARE) -> int:
    """The fewest step tokens that reach ``share`` of the best throughput."""
    best = max(point.tokens_per_s for point in points)
    return min(p.num_tokens for p in points if p.tokens_per_s >= share * best)


def profile_prefill(
    config: EngineConfig, on_point: Callable[[PrefillPoint], None] = lambda point: None
) -> PrefillProfile:
    """Load the model, measure it for half a minute, and keep the result for engines here.

    Parameters
    ----------
    config
        Model, dtype, threads and block size.
    on_point
        Called with the first figure of every step size, for progress; later ones may be better.

    Raises
    ------
    ConfigError
        For the mock, which has no throughput.
    ModelError
        The model cannot be loaded, or the result cannot be written.
    """
    from daskserve.workers.loader import load_runner

    if config.model == "mock":
        raise ConfigError("the mock model has fixed step times: there is nothing to profile")
    runner = load_runner(resolve(config.model), replace(config, device="cpu"))
    points = measure(runner, config.block_size or runner.page_tokens, on_point=on_point)
    profile = PrefillProfile(Machine.of(config), tuple(points))
    store(profile)
    return profile


def stored_budget(config: EngineConfig) -> int | None:
    """L_m as measured earlier for this model on this machine; None if it never was."""
    path = Machine.of(config).path
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["points"]
        return knee([PrefillPoint(**row) for row in rows])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        logger.warning("the prefill profile %s is not readable and not used: %r", path, error)
        return None


def measure(
    runner: Runner,
    block_size: int,
    step_tokens: Sequence[int] = STEP_TOKENS,
    on_point: Callable[[PrefillPoint], None] = lambda point: None,
) -> list[PrefillPoint]:
    """Time whole prefill steps: each size as one prompt, and as several short ones."""
    sizes = [size for size in step_tokens if size <= runner.shape.context_tokens]
    pages_per_prompt = blocks_for(BATCHED_PROMPT_TOKENS, block_size)
    num_blocks = max(sizes) // BATCHED_PROMPT_TOKENS * pages_per_prompt
    num_blocks = max(num_blocks, blocks_for(max(sizes), block_size))
    pool = KVPool(runner.shape, runner.dtype, num_blocks, block_size)
    runner.bind(pool.pages)
    batches = {}
    for size in sizes:
        for num_prompts in sorted({1, max(size // BATCHED_PROMPT_TOKENS, 1)}):
            length = size // num_prompts
            batches[num_prompts, length] = _prompts(
                runner.shape.vocab_size, num_prompts, length, block_size
            )
    # In rounds, and the fastest counts: whatever else the machine does for a while then slows
    # one try of every size, not all tries of one.
    fastest: dict[tuple[int, int], float] = {}
    for _ in range(_ROUNDS):
        for key, batch in batches.items():
            step_s = _step_s(runner, batch)
            if key not in fastest:
                on_point(PrefillPoint(*key, step_s))
            fastest[key] = min(fastest.get(key, step_s), step_s)
    return [PrefillPoint(*key, step_s) for key, step_s in fastest.items()]


def _step_s(runner: Runner, batch: ForwardBatch) -> float:
    runner.forward(batch)
    times: list[float] = []
    while sum(times) < _ROUND_S:
        started_at = time.perf_counter()
        runner.forward(batch)
        times.append(time.perf_counter() - started_at)
    return min(times)


def _prompts(vocab_size: int, num_prompts: int, length: int, block_size: int) -> ForwardBatch:
    rng = np.random.default_rng(0)
    pages = blocks_for(length, block_size)
    return ForwardBatch(
        token_ids=rng.integers(0, vocab_size, num_prompts * length),
        positions=np.tile(np.arange(length), num_prompts),
        query_start=np.arange(num_prompts + 1, dtype=np.int32) * np.int32(length),
        context_tokens=np.full(num_prompts, length, np.int32),
        page_table=1 + np.arange(num_prompts * pages, dtype=np.int32).reshape(num_prompts, pages),
    )


def store(profile: PrefillProfile) -> None:
    path = profile.machine.path
    content = asdict(profile) | {"budget_tokens": profile.budget_tokens}
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(content, indent=2), encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise ModelError(
            f"cannot write the profile {path}: {error.strerror or error};"
            " set DASKSERVE_CACHE to a folder that can be written"
        ) from error


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()
