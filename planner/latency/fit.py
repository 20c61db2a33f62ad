"""Fits latency models to measured steps, by least squares on relative errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields
from itertools import accumulate, pairwise

import numpy as np
from scipy.optimize import least_squares, nnls

from daskserve.core.placement import Parallelism
from daskserve.errors import ConfigError
from daskserve.planner.hardware import GPU
from daskserve.planner.latency.paper import PaperCoefficients, PaperModel, attention_unit
from daskserve.planner.latency.profile import Profile
from daskserve.planner.latency.protocol import LatencyModel
from daskserve.planner.latency.roofline import Efficiencies, Roofline
from daskserve.planner.model_spec import ModelSpec

PRIOR_WEIGHT = 0.1
"""Pull of every log-efficiency towards its default, in units of one row's relative error.

Enough to settle what the rows do not show (all-reduces in a profile of TP 1), too weak to bend
the rest."""
LOW = Efficiencies(0.2, 0.2, 0.1, 0.2, 0.05, 5e-7, 1e-7, 1.0)
HIGH = Efficiencies(1.0, 1.0, 1.0, 1.0, 1.0, 1e-4, 1e-2, 60.0)

Measured = tuple[ModelSpec, GPU, Profile]


def fit_efficiencies(measured: Sequence[Measured]) -> Efficiencies:
    """Efficiencies that explain profiles of one or several models on one system.

    Raises
    ------
    ConfigError
        No profile was given.
    """
    if not measured:
        raise ConfigError("no data: a fit needs at least one profile")
    start = np.log(astuple(Efficiencies()))

    def residuals(logs: np.ndarray) -> np.ndarray:
        roofline = Roofline(Efficiencies(*np.minimum(np.exp(logs), astuple(HIGH))))
        errors = [_log_errors(roofline, *one) for one in measured]
        return np.concatenate([*errors, PRIOR_WEIGHT * (logs - start)])

    bounds = (np.log(astuple(LOW)), np.log(astuple(HIGH)))
    found = least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=0.05)
    values = np.minimum(np.exp(found.x), astuple(HIGH))
    return Efficiencies(**dict(zip(_names(), map(float, values), strict=True)))


def _names() -> list[str]:
    return [item.name for item in fields(Efficiencies)]


def _log_errors(roofline: Roofline, model: ModelSpec, gpu: GPU, profile: Profile) -> np.ndarray:
    errors = []
    for tp in profile.tensor_degrees:
        tokens, batch, latency_s = profile.rows("prefill", tp)
        linear = roofline.prefill_linear_s(model, gpu, tp, tokens * batch, batch)
        quadratic = roofline.prefill_quadratic_s(model, gpu, tp) * batch * tokens**2
        errors.append(np.log((linear + quadratic) / latency_s))
        tokens, batch, latency_s = profile.rows("decode", tp)
        base = roofline.decode_base_s(model, gpu, tp, batch)
        context = roofline.decode_per_context_s(model, gpu, tp) * batch * tokens
        errors.append(np.log((base + context) / latency_s))
    return np.concatenate(errors)


def fit_paper_model(
    model: ModelSpec,
    profile: Profile,
    batch_knots: Sequence[int] = (),
    per_prompt: bool = False,
) -> PaperModel:
    """C1..C5 for every TP degree in a profile of one model on one GPU type.

    Between ``batch_knots``, rising batch sizes, a decode step also grows with its batch, never
    falling, and ``per_prompt`` has each prompt cost something by itself; the paper has neither.
    """
    coefficients = {}
    unit = attention_unit(model)
    for tp in profile.tensor_degrees:
        tokens, batch, latency_s = profile.rows("prefill", tp)
        total = tokens * batch
        columns = [model.num_active_parameters * total, unit * batch * tokens**2]
        columns += [np.ones_like(total), *([batch] if per_prompt else [])]
        c1, c2, c3, *own = _relative_fit(columns, latency_s)
        tokens, batch, latency_s = profile.rows("decode", tp)
        columns = [np.full_like(tokens, model.num_active_parameters), unit * tokens * batch]
        for low, high in pairwise(batch_knots):
            ramp = np.clip((batch - low) / (high - low), 0.0, 1.0)
            columns.append(model.num_active_parameters * ramp)
        c4, c5, *risen = _relative_fit(columns, latency_s)
        growth = zip(batch_knots, accumulate(risen, initial=0.0), strict=bool(batch_knots))
        coefficients[tp] = PaperCoefficients(c1, c2, c3, c4, c5, tuple(growth), *own)
    return PaperModel(coefficients)


def _relative_fit(columns: list[np.ndarray], latency_s: np.ndarray) -> list[float]:
    """Coefficients of at least 0 with the least squared relative error."""
    if len(latency_s) < len(columns):
        raise ConfigError(f"no data: {len(latency_s)} rows cannot fit {len(columns)} coefficients")
    matrix = np.stack(columns, axis=1) / latency_s[:, None]
    scale = matrix.max(axis=0)
    scale[scale == 0.0] = 1.0  # what no row shows gets 0
    found, _ = nnls(matrix / scale, np.ones(len(latency_s)))
    return [float(value) for value in found / scale]


def median_error(latency: LatencyModel, measured: Sequence[Measured], phase: str) -> float:
    """Median of ``|predicted / measured - 1|`` over the rows of one phase."""
    errors = []
    for model, gpu, profile in measured:
        for tp in profile.tensor_degrees:
            step = latency.step_times(model, gpu, Parallelism(tp))
            for tokens, batch, latency_s in zip(*profile.rows(phase, tp), strict=True):
                if phase == "prefill":
                    predicted = step.prefill_s(tokens * batch, batch * tokens**2, batch)
                else:
                    predicted = step.decode_s(int(batch), batch * tokens)
                errors.append(abs(predicted / latency_s - 1.0))
    return float(np.median(errors))
