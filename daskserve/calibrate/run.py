"""The whole calibration: measure, fit, judge, and put it into one profile."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from daskserve.calibrate.fitting import (
    fit,
    fit_with_intervals,
    judge,
    predict,
    split,
    why_not,
)
from daskserve.calibrate.grid import Grid, Point
from daskserve.calibrate.handing_over import hand_overs, link_of, measurement, transfers_of
from daskserve.calibrate.in_service import (
    TRAFFIC_OUTPUT_TOKENS,
    Answer,
    decode_steps,
    most_context_tokens,
    traffic,
)
from daskserve.calibrate.machine import HARDWARE, hardware_facts, machine_facts
from daskserve.calibrate.pace import Pace
from daskserve.calibrate.service_fit import Served, overheads_of
from daskserve.calibrate.sharing import sharing_of
from daskserve.calibrate.steps import StepRig, measure_steps
from daskserve.core.instance import DEFAULT_BLOCK_SIZE, DEFAULT_BUDGET_TOKENS, EngineConfig
from daskserve.core.placement import Parallelism
from daskserve.errors import ConfigError
from daskserve.models.catalog import resolve
from daskserve.planner.hardware import GPU
from daskserve.planner.latency import CalibratedModel, Calibration, PaperCoefficients
from daskserve.planner.latency.calibration import (
    EngineFacts,
    HardwareFacts,
    StepPoint,
)
from daskserve.planner.model_spec import ModelSpec
from daskserve.service import Service
from daskserve.workers.forward import ModelShape
from daskserve.workers.loading import LoadModel, load_model
from daskserve.workers.profile import (
    Machine,
    PrefillPoint,
    PrefillProfile,
    knee,
    store,
    stored_budget,
)

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """All that is timed.

    Parameters
    ----------
    config
        The engine, its threads and L_m filled in.
    times
        Repeats of every step, in seconds.
    served
        What services took, at the pace that the machine had when it made the steps.
    page_bytes
        KV bytes of one page.
    """

    config: EngineConfig
    model: ModelSpec
    times: dict[Point, list[float]]
    served: Served
    page_bytes: int

    @property
    def medians_s(self) -> dict[Point, float]:
        return {point: float(np.median(values)) for point, values in self.times.items()}


def calibrate(
    config: EngineConfig,
    grid: Grid,
    on_progress: OnProgress = lambda line: None,
    load: LoadModel = load_model,
) -> Calibration:
    """Measure a model on this machine and fit the planner's latency model to it.

    L_m is what engines here use since it was measured before, else it follows from the prefill
    steps; see `keep_budget`.

    Parameters
    ----------
    config
        Model, dtype and threads of one instance.
    grid
        What to measure.
    on_progress
        Called with a line of text now and then.
    load
        Gives the runner and the tokenizer of the steps that are measured in this process.

    Raises
    ------
    ConfigError, ModelError, ClusterError
        Nothing to measure; the model cannot be loaded or run; the service does not start.
    """
    measured_here = _measure(config, grid, on_progress, load)
    on_progress("fitting")
    return calibration_of(measured_here)


def _measure(
    config: EngineConfig, grid: Grid, on_progress: OnProgress, load: LoadModel
) -> Measured:
    cores = len(os.sched_getaffinity(0))
    # What is measured, and what the profile says of the hardware, are the cores of this machine.
    config = replace(
        config,
        num_threads=config.num_threads or cores,
        device="cpu",
        block_size=_page_tokens(config),
    )
    on_progress(f"loading {config.model}")
    rig = StepRig(config, grid, load)
    model = model_spec(config, rig.shape, rig.page_bytes)
    on_progress(f"timing {len(rig.points)} kinds of engine steps in this process")
    times = measure_steps(rig, grid, on_round=lambda n: on_progress(_round(n)))
    medians_s = {point: float(np.median(values)) for point, values in times.items()}
    config = replace(config, prefill_budget_tokens=_budget_tokens(config, medians_s))
    context_tokens, page_bytes = rig.shape.context_tokens, rig.page_bytes
    before = Pace(rig, medians_s).off()
    del rig  # the services load the model again
    batches = _served_batches(grid, times)
    served = _serve(config, grid, context_tokens, batches, on_progress)
    on_progress("timing lone steps once more")
    off = (before + Pace(StepRig(config, grid, load), medians_s).off()) / 2
    on_progress(f"lone steps took {off:+.1%} around the service; its times count less that much")
    return Measured(config, model, times, served.at_pace(1.0 / (1.0 + off)), page_bytes)


def _serve(
    config: EngineConfig,
    grid: Grid,
    context_tokens: int,
    batches: Sequence[int],
    on_progress: OnProgress,
) -> Served:
    """What a prefill and a decode process take, and without cores for both a colocated one.

    Processes may use the same cores where only one of them computes at a time.
    """

    def on_request(done: int, of: int) -> None:
        if done % 10 == 0:
            on_progress(f"request {done} of {of}")

    repeats = grid.num_service_rows
    has_own_cores = 2 * (config.num_threads or 1) <= len(os.sched_getaffinity(0))
    on_progress("starting a prefill and a decode process")
    with Service.local(config=config, cores="auto" if has_own_cores else None) as service:
        apart = hand_overs(service, grid, context_tokens, on_request)
        if has_own_cores:
            on_progress("decoding in batches")
            rows = decode_steps(service, batches, repeats)
            mixed = _mixed(service, grid, context_tokens, on_progress)
            return Served(apart, apart, rows, mixed, is_colocated=False)
    on_progress("starting a colocated process")
    with Service.local(prefill=0, decode=0, colocated=1, config=config) as service:
        answers = hand_overs(service, grid, context_tokens, on_request)
        on_progress("decoding in batches")
        rows = decode_steps(service, batches, repeats)
        mixed = _mixed(service, grid, context_tokens, on_progress)
        return Served(apart, answers, rows, mixed, is_colocated=True)


def _served_batches(grid: Grid, points: Collection[Point]) -> list[int]:
    """Those whose requests a step by itself had room for too: batch, pages and context allow."""
    decodes = [point for point in points if point.phase == "decode"]
    return [
        batch
        for batch in grid.service_batches
        if any(p.batch >= batch and p.tokens >= most_context_tokens(batch) for p in decodes)
    ]


def _mixed(
    service: Service, grid: Grid, context_tokens: int, on_progress: OnProgress
) -> list[list[Answer]]:
    """Rounds of mixed traffic; none where no prompt fits."""
    on_progress("mixed traffic")
    room = context_tokens - max(TRAFFIC_OUTPUT_TOKENS)
    prompts = [tokens for tokens in grid.traffic_tokens if tokens <= room]
    if not prompts:
        return []
    return traffic(service, prompts, grid.num_traffic_requests, grid.num_traffic_rounds)


def calibration_of(measured_here: Measured) -> Calibration:
    """Fit, judge, and put everything into one profile."""
    config, model, times = measured_here.config, measured_here.model, measured_here.times
    medians_s = measured_here.medians_s
    served = measured_here.served
    transfers = transfers_of(served.apart, measured_here.page_bytes, _page_tokens(config))
    kv_latency_s, link = link_of(transfers)
    hardware = hardware_facts(config, config.num_threads or 1, model, medians_s, link)
    parts = split(list(times))
    found, coefficients = fit_with_intervals(model, times, parts.fitted)
    base = _latency(model, hardware, found, config, medians_s)
    predicted_s = predict(base, list(times))
    paper = fit(model, {p: medians_s[p] for p in parts.fitted}, as_printed=True)
    paper_s = predict(replace(base, coefficients=paper), list(times))
    errors = judge(parts, medians_s, predicted_s, paper_s)
    overheads = overheads_of(served, base, medians_s, kv_latency_s)
    inside = replace(
        base,
        prefill_extra_s=overheads.prefill_extra.median_s,
        prefill_extra_per_token_s=overheads.prefill_extra_per_token_s,
        decode_extra_s=overheads.decode_extra.median_s,
        decode_extra_per_request_s=overheads.decode_extra_per_request_s,
    )
    reasons = why_not(errors, medians_s, predicted_s)
    in_service = inside.step_times(model, inside.hardware, Parallelism())
    sharing = sharing_of(served.traffic, in_service, served.is_colocated)
    if sharing is None:
        reasons.append("no mixed traffic could be measured")
    return Calibration(
        schema_version=6,
        is_trusted=not reasons,
        why_not=reasons,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine_facts(config),
        engine=EngineFacts(
            model=config.model,
            dtype=config.dtype,
            num_threads=config.num_threads or 1,
            block_size=_page_tokens(config),
            prefill_budget_tokens=base.prefill_budget_tokens,
            max_batch_size=base.max_batch_size,
        ),
        model=model,
        hardware=hardware,
        coefficients=coefficients,
        errors=errors,
        steps=_steps(times, predicted_s, parts.held_out),
        kv_transfers=transfers,
        overheads=overheads,
        sharing=sharing,
    )


def model_spec(config: EngineConfig, shape: ModelShape, page_bytes: int) -> ModelSpec:
    """What the planner needs of the model, in the precision that is served.

    The mock has neither weights nor attention: one number of each stands for them.
    """
    if config.model == "mock":
        return ModelSpec(
            name="mock",
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            hidden_size=1,
            vocab_size=shape.vocab_size,
            num_parameters=float(shape.vocab_size),
            num_active_parameters=float(shape.vocab_size),
            kv_values_per_token=1,
            attention_width=1.0,
            context_tokens=shape.context_tokens,
            kv_bytes_per_value=float(page_bytes // _page_tokens(config)) / 2,
        )
    spec = ModelSpec.load(str(resolve(config.model)))
    size = 4.0 if config.dtype == "float32" else 2.0
    name = config.model.rstrip("/").rsplit("/", 1)[-1]
    return replace(spec.with_precision(size, size), name=name)


def _budget_tokens(config: EngineConfig, medians_s: Mapping[Point, float]) -> int:
    """L_m: as configured or measured before, else the knee of these steps."""
    if config.prefill_budget_tokens is not None:
        return config.prefill_budget_tokens
    if config.model == "mock":
        return DEFAULT_BUDGET_TOKENS
    points = [
        PrefillPoint(point.batch, point.tokens, step_s)
        for point, step_s in medians_s.items()
        if point.phase == "prefill"
    ]
    return stored_budget(config) or knee(points)


def keep_budget(config: EngineConfig, found: Calibration) -> None:
    """Let engines here use the L_m of this calibration, unless they have one (ModelError)."""
    if config.model == "mock" or stored_budget(config) is not None:
        return
    points = [
        PrefillPoint(point.batch, point.tokens, point.median_s)
        for point in found.steps
        if point.phase == "prefill"
    ]
    store(PrefillProfile(Machine.of(config), tuple(points)))


def _latency(
    model: ModelSpec,
    hardware: HardwareFacts,
    coefficients: PaperCoefficients,
    config: EngineConfig,
    medians_s: Mapping[Point, float],
) -> CalibratedModel:
    gpu = GPU(
        HARDWARE,
        hardware.memory_bytes,
        hardware.flops_per_s,
        hardware.memory_bytes_per_s,
        hardware.link_bytes_per_s,
        price_per_hour=0.0,
    )
    largest = max(point.batch for point in medians_s if point.phase == "decode")
    return CalibratedModel(model, gpu, coefficients, config.prefill_budget_tokens or 1, largest)


def _steps(
    times: Mapping[Point, Sequence[float]],
    predicted_s: Mapping[Point, float],
    held_out: frozenset[Point],
) -> list[StepPoint]:
    return [
        StepPoint(
            phase=point.phase,
            batch=point.batch,
            tokens=point.tokens,
            predicted_s=predicted_s[point],
            is_held_out=point in held_out,
            **measurement(values).model_dump(),
        )
        for point, values in times.items()
    ]


def _round(number: int) -> str:
    return "warming up" if number == 0 else f"round {number}"


def check_writable(path: Path) -> None:
    """Before minutes of measuring: raises ConfigError when the profile could not be written."""
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise ConfigError(f"cannot write {path}: {folder} must be a folder that can be written")


def _page_tokens(config: EngineConfig) -> int:
    return config.block_size or DEFAULT_BLOCK_SIZE
