"""A calibration for people: tables, and every residual as a bar."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from daskserve.planner.latency.calibration import (
    Calibration,
    Fitted,
    Measurement,
    StepPoint,
    TransferPoint,
)
from daskserve.planner.latency.paper import attention_unit

_BAR_CELLS = 10
"""On each side of a residual's zero."""


def report(found: Calibration) -> Group:
    """What was measured, how well it fits, and whether to trust it."""
    return Group(
        Text(_headline(found)),
        Rule("residuals: fitted against measured", style="dim"),
        _residuals(found.steps),
        Rule("fit", style="dim"),
        _coefficients(found),
        _errors(found),
        Rule("between the steps", style="dim"),
        _overheads(found),
        _verdict(found),
    )


def _headline(found: Calibration) -> str:
    engine, machine = found.engine, found.machine
    return (
        f"{engine.model} {engine.dtype}, {engine.num_threads} of {machine.num_cores} cores,"
        f" {machine.cpu}; {found.hardware.flops_per_s / 1e9:.0f} GFLOP/s,"
        f" {found.hardware.memory_bytes_per_s / 1e9:.1f} GB/s;"
        f" L_m = {engine.prefill_budget_tokens} tokens"
    )


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _residuals(points: Sequence[StepPoint]) -> Table:
    largest = max(abs(point.error) for point in points) or 1.0
    table = _table("step", "measured ms", "spread", "fitted ms", "error")
    table.add_column(f"-{largest:.0%} .. +{largest:.0%}; o held out", no_wrap=True)
    for point in points:
        table.add_row(
            f"{point.phase} {point.batch} x {point.tokens}",
            f"{point.median_s * 1e3:.2f}",
            _share(point),
            f"{point.predicted_s * 1e3:.2f}",
            f"{point.error:+.1%}",
            _bar(point.error / largest, "o" if point.is_held_out else "#"),
        )
    return table


def _bar(share: float, mark: str) -> str:
    cells = round(abs(share) * _BAR_CELLS)
    left = (mark * cells if share < 0 else "").rjust(_BAR_CELLS)
    right = (mark * cells if share > 0 else "").ljust(_BAR_CELLS)
    return f"{left}|{right}"


def _share(one: Measurement) -> str:
    return f"{one.spread_s / one.median_s:.0%}" if one.median_s else "-"


def _coefficients(found: Calibration) -> Table:
    """C1..C5 in units of this model, and how decode steps grow with their batch."""
    c, model = found.coefficients, found.model
    weights, unit = model.num_active_parameters, attention_unit(model)
    rows = [
        ("prefill, us per token (C1)", c.c1_s_per_weight_token, weights * 1e6),
        (
            "prefill, ms per (1000 tokens)^2 (C2)",
            c.c2_s_per_attention_token_squared,
            unit * 1e9,
        ),
        ("prefill, ms per step (C3)", c.c3_s, 1e3),
        ("prefill, ms more for each prompt", c.per_prompt_s, 1e3),
        ("decode, ms per step (C4)", c.c4_s_per_weight, weights * 1e3),
        ("decode, ms per 1000 tokens of context (C5)", c.c5_s_per_attention_token, unit * 1e6),
    ]
    rows += [
        (f"decode, ms more for {one.batch} requests", one, weights * 1e3)
        for one in c.growth_s_per_weight[1:]
    ]
    table = _table("coefficient", "value", "90 % interval")
    for name, one, scale in rows:
        table.add_row(name, f"{one.value * scale:.4g}", _interval(one, scale))
    return table


def _interval(one: Fitted, scale: float) -> str:
    return f"{one.low * scale:.4g} .. {one.high * scale:.4g}"


def _errors(found: Calibration) -> Table:
    table = _table(
        "error at held-out points", "median", "p90", "limit", "fitted", "held out", "paper's"
    )
    for phase, error in found.errors.items():
        table.add_row(
            phase,
            f"{error.median:.1%}",
            f"{error.p90:.1%}",
            f"{error.limit:.0%} median",
            str(error.num_fitted),
            str(error.num_held_out),
            f"{error.paper_median:.1%}",
        )
    return table


def _overheads(found: Calibration) -> Table:
    added = found.overheads
    kind = "colocated" if added.is_colocated else "prefill and decode apart"
    table = _table(f"in a service, {kind}", "median ms", "spread", "repeats")
    rows: list[tuple[str, Measurement]] = [
        ("dispatch: submitted to prefill starts", added.dispatch),
        ("hand-over: first token to decode starts, no KV", added.hand_over),
        ("prefill step in a service, more than alone", added.prefill_extra),
        ("decode step in a service, more than alone", added.decode_extra),
    ]
    per_token_s, per_request_s = added.prefill_extra_per_token_s, added.decode_extra_per_request_s
    sharing = found.sharing
    rows += [(_transfer_name(point), point) for point in found.kv_transfers]
    for name, one in rows:
        table.add_row(name, f"{one.median_s * 1e3:.2f}", _share(one), str(one.num_repeats))
    table.add_row("prefill: and for 1,000 tokens of its prompts", f"{per_token_s * 1e6:.2f}")
    table.add_row("decode: and for each request of its batch", f"{per_request_s * 1e3:.2f}")
    when = "in mixed traffic" if added.is_colocated else "while the other instance computes"
    if sharing is not None:
        whatever_s, following_s = sharing.prefill_added_s, sharing.prefill_following_s
        table.add_row(f"prefill step {when}, whatever its size", f"{whatever_s * 1e3:.2f}")
        table.add_row("and one that begins as another ends", f"{following_s * 1e3:.2f}")
    for name, share in (
        (("prefill", sharing.prefill), ("decode", sharing.decode)) if sharing else ()
    ):
        what = f"{name} step {when}"
        table.add_row(what, f"{share.mean:+.1%}", f"{share.spread:.1%}", str(share.num_repeats))
    link = found.hardware.link_bytes_per_s / 1e9
    table.add_row(
        f"KV transfer, fitted: + bytes at {link:.2f} GB/s", f"{added.kv_latency_s * 1e3:.2f}"
    )
    return table


def _transfer_name(point: TransferPoint) -> str:
    return f"KV transfer of {point.kv_bytes / 2**20:.3g} MiB"


def _verdict(found: Calibration) -> Text:
    if found.is_trusted:
        return Text("trusted: held-out errors are within their limits")
    return Text("\n".join(["NOT trusted:", *found.why_not]), style="bold red")
