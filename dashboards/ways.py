"""A plan's ranking as a table, for the Plan and the What-if page."""

from __future__ import annotations

from daskserve.dashboards.theme import Theme, dollars_text, escape, number_text
from daskserve.planner.plan_record import PlanRecord, Way

_HEADS = ("", "Way", "Instances", "GPUs", "req/s", "$/h", "$/M tokens", "Binding resource")
_FIRST_NUMBER, _LAST_NUMBER = 3, 6


def ways_css(theme: Theme) -> str:
    return f"""
    .scroll {{ overflow-x: auto; }}
    .ways {{ width: 100%; font-size: 13px; }}
    .ways th, .ways td {{ border-bottom: 1px solid {theme.line}; padding: 6px 12px 6px 0; }}
    .ways tr.chosen td {{ font-weight: 600; }}
    .ways tr.out td {{ color: {theme.muted}; }}
    .ways .note {{ color: {theme.bad}; }}
    """


def ways_html(plan: PlanRecord) -> str:
    """The ranking; P prefill, D decode, C colocated instances."""
    heads = "".join(
        f'<th class="{"number" if _is_number(i) else ""}">{head}</th>'
        for i, head in enumerate(_HEADS)
    )
    rows = "".join(map(_row, plan.ways))
    return f'<div class="scroll"><table class="ways"><tr>{heads}</tr>{rows}</table></div>'


def _is_number(column: int) -> bool:
    return _FIRST_NUMBER <= column <= _LAST_NUMBER


def _row(way: Way) -> str:
    has_any = way.num_gpus > 0
    cells = [
        "✓" if way.is_chosen else "",
        way.name,
        way.instances or "none",
        str(way.num_gpus) if has_any else "–",
        number_text(way.rate) if has_any else "–",
        dollars_text(way.price_per_hour),
        dollars_text(way.price_per_million_tokens),
    ]
    html = "".join(
        f'<td class="{"number" if _is_number(i) else ""}">{escape(cell)}</td>'
        for i, cell in enumerate(cells)
    )
    last = escape(way.binding)
    if way.note:
        last += f'<div class="note">{escape(way.note)}</div>'
    kind = "chosen" if way.is_chosen else "" if way.is_usable else "out"
    return f'<tr class="{kind}">{html}<td>{last}</td></tr>'
