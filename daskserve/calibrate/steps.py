"""Times whole engine steps: scheduling, the model, sampling and text, as an instance runs them.

A prefill and a decode engine share one model and one pool of KV pages. Contexts of decode steps are
taken as pulled already, so that no prompt has to be computed for them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np

from daskserve.calibrate.grid import TAIL_TOKENS, Grid, Point
from daskserve.core.instance import DEFAULT_BLOCK_SIZE, HOST_KV_BYTES, EngineConfig, Role
from daskserve.core.kv import KVHandle
from daskserve.core.params import SamplingParams
from daskserve.core.request import Request
from daskserve.errors import DaskserveError, ModelError
from daskserve.workers.engine import Engine, Reserved
from daskserve.workers.kv_pool import KVPool, page_bytes
from daskserve.workers.loading import LoadModel, load_model
from daskserve.workers.sequence import Sequence as EngineSequence

_LAYOUT = "calibrate"
_STEPS_PER_VISIT = 3
_EVERY_TOKEN = 2**20
LEAST_ROUNDS = 3


class StepRig:
    """Two engines of one process, driven step by step.

    Parameters
    ----------
    config
        Model, dtype, threads, block size, largest batch and memory for KV.
    grid
        What will be measured.
    load
        Gives the runner and the tokenizer (ModelError).
    """

    def __init__(self, config: EngineConfig, grid: Grid, load: LoadModel = load_model) -> None:
        runner, tokenizer = load(config)
        shape, block_size = runner.shape, config.block_size or DEFAULT_BLOCK_SIZE
        self.shape = shape
        self.page_bytes = page_bytes(shape, runner.dtype, block_size)
        self.points = grid.points(
            shape.context_tokens,
            config.max_batch_size,
            config.num_kv_blocks or (config.kv_memory_bytes or HOST_KV_BYTES) // self.page_bytes,
            block_size,
        )
        # One page more for each request: the decode engine keeps that many in reserve.
        num_blocks = max(point.pages(block_size) + point.batch for point in self.points)
        pool = KVPool(shape, runner.dtype, num_blocks, block_size)
        self._engines = {
            role: Engine(
                runner, pool, role, config, tokenizer, budget_tokens=_EVERY_TOKEN, kv_layout=_LAYOUT
            )
            for role in (Role.PREFILL, Role.DECODE)
        }
        self._numbers = itertools.count()
        self._rng = np.random.default_rng(0)

    def seconds(self, point: Point) -> float:
        """One measurement. Raises ModelError when the model cannot run the step."""
        return self._prefill(point) if point.phase == "prefill" else self._decode(point)

    def _prefill(self, point: Point) -> float:
        engine = self._engines[Role.PREFILL]
        requests = [self._request(point) for _ in range(point.batch)]
        for request in requests:
            engine.add(EngineSequence(request, streams=True))
        step_s = self._step(engine, point.batch)
        for request in requests:
            engine.release(request.request_id, None)
        return step_s

    def _decode(self, point: Point) -> float:
        engine = self._engines[Role.DECODE]
        requests = [self._request(point) for _ in range(point.batch)]
        now = engine.clock()
        for request in requests:
            handle = KVHandle(request.request_id, _LAYOUT, b"", point.tokens, _LAYOUT, 0)
            engine.add(
                EngineSequence(
                    request, streams=True, handle=handle, output_ids=[0], first_token_at=now
                )
            )
        engine.schedule()  # nothing to compute yet: reserves pages and asks for the pulls
        for _, payload in list(engine.events):
            if isinstance(payload, Reserved):
                engine.pull_ended(payload.owner, True, 0.0)
        times = [self._step(engine, point.batch) for _ in range(1 + _STEPS_PER_VISIT)]
        for request in requests:
            engine.abort(request.request_id)
        engine.events.clear()
        return float(np.median(times[1:]))  # the first one finds the caches cold

    def _step(self, engine: Engine, num_rows: int) -> float:
        started_at = time.perf_counter()
        step = engine.schedule()
        if step is None or len(step.sequences) != num_rows:
            raise ModelError(f"a step of {num_rows} requests was not formed: {_failure(engine)}")
        engine.execute(step)
        step_s = time.perf_counter() - started_at
        failure = _failure(engine)
        engine.events.clear()
        if failure:
            raise ModelError(f"a step of {num_rows} requests failed: {failure}")
        return step_s

    def _request(self, point: Point) -> Request:
        ids = self._rng.integers(0, self.shape.vocab_size, point.tokens)
        params = SamplingParams(max_tokens=TAIL_TOKENS, ignore_eos=True)
        number = f"calibrate-{next(self._numbers)}"
        return Request(number, tuple(ids.tolist()), params, time.monotonic(), seed=0)


def _failure(engine: Engine) -> str:
    errors = [payload for _, payload in engine.events if isinstance(payload, DaskserveError)]
    return str(errors[0]) if errors else ""


def measure_steps(
    rig: StepRig,
    grid: Grid,
    seed: int = 0,
    on_round: Callable[[int], None] = lambda number: None,
) -> dict[Point, list[float]]:
    """Seconds of every point, once per round.

    Every round visits all points in another random order, so that what the machine does besides
    for a while falls on different points. The first round is for warming up and is dropped.
    """
    rng = np.random.default_rng(seed)
    times: dict[Point, list[float]] = {point: [] for point in rig.points}
    started_at = time.monotonic()
    for number in range(grid.num_rounds + 1):
        if number > LEAST_ROUNDS and time.monotonic() - started_at > grid.enough_s:
            break
        on_round(number)
        for index in rng.permutation(len(rig.points)):
            step_s = rig.seconds(rig.points[index])
            if number > 0:
                times[rig.points[index]].append(step_s)
    return times
