"""A plan with its curves in a file: ``daskserve plan --report`` writes, the Plan page reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from daskserve.errors import ConfigError
from daskserve.planner.plan_record import PlanRecord, record_of
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.plan_result import Plan
from daskserve.planner.search.simulated import Executor

_KIND, VERSION = "daskserve_plan", 1


def report_of(answer: Plan, request: PlanRequest, executor: Executor | None = None) -> PlanRecord:
    """The record of a plan, with what it was asked for in words; simulates curves.

    Parameters
    ----------
    answer, request
        From `daskserve.planner.planning`, and what was asked.
    """
    return record_of(answer, request.at_rate(answer.rate), _asked(request), executor)


def _asked(request: PlanRequest) -> dict[str, Any]:
    _, prompt, output = request.workload.arrays()
    lengths = f"{prompt.mean():.4g} prompt and {output.mean():.4g} output tokens"
    if len(request.workload) > 1:
        lengths = f"{len(request.workload)} requests of {lengths} on average"
    return {
        "model": request.model.name,
        "cluster": str(request.cluster),
        "workload": lengths,
        "slo": str(request.classes),
    }


def write_plan(record: PlanRecord, path: Path) -> None:
    """ConfigError when it cannot be written."""
    text = json.dumps({_KIND: VERSION, **record.to_record()}, indent=1)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def read_plan(path: Path) -> PlanRecord:
    """Inverse of `write_plan` (ConfigError)."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError:
        document = None
    if not isinstance(document, dict) or _KIND not in document:
        raise ConfigError(f"{path} is not what daskserve plan --report writes")
    version = document.pop(_KIND)
    if version != VERSION:
        raise ConfigError(f"{path} has version {version}; this reads version {VERSION}")
    try:
        return PlanRecord.from_record(document)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
