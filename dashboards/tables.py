"""Tables of plain text and numbers: whatever is in a cell, it is never taken for HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import panel as pn

from daskserve.dashboards.theme import FONT, Theme


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Parameters
    ----------
    kind
        ``text``, ``number`` (right-aligned) or ``share`` (a bar, 0..100).
    least_px
        The last column gets what the others leave; in a narrow window that must not be nothing.
    hides
        In a narrow window the columns with the highest number go first; 0 stays.
    """

    name: str
    title: str
    kind: str = "text"
    width: int | None = None
    least_px: int | None = None
    hides: int = 0


def new_table(theme: Theme, columns: Sequence[Column], **given: Any) -> pn.widgets.Tabulator:
    """An empty table."""
    formatters: dict[str, Any] = {}
    for column in columns:
        formatters[column.name] = {"type": "plaintext"}
        if column.kind == "share":
            formatters[column.name] = {
                "type": "progress",
                "min": 0,
                "max": 100,
                "color": [theme.decode] * 6 + [theme.prefill, theme.bad],  # as the heatmap's
                "legend": True,
                "legendColor": theme.text,
            }
    return pn.widgets.Tabulator(
        pd.DataFrame({column.name: [] for column in columns}),
        titles={column.name: column.title for column in columns},
        text_align={c.name: "right" for c in columns if c.kind == "number"},
        header_align={c.name: "right" for c in columns if c.kind == "number"},
        formatters=formatters,
        widths={c.name: c.width for c in columns if c.width},
        configuration=_configuration(columns),
        show_index=False,
        disabled=True,
        layout="fit_data_stretch",
        theme="simple",
        sizing_mode="stretch_width",
        margin=0,
        stylesheets=[_css(theme)],
        **given,
    )


def _configuration(columns: Sequence[Column]) -> dict[str, Any]:
    given: list[dict[str, Any]] = []
    for column in columns:
        least = {"minWidth": column.least_px} if column.least_px else {}
        given.append({"field": column.name, "responsive": column.hides, **least})
    hide = {"responsiveLayout": "hide"} if any(column.hides for column in columns) else {}
    # Rows may come while the browser still builds the table: Panel shows them once it is built.
    return {"columns": given, "debugInitialization": False, **hide}


def show_rows(table: pn.widgets.Tabulator, rows: pd.DataFrame) -> None:
    """Put rows in place; cells that changed are patched, so that nothing flickers or scrolls."""
    shown = table.value
    if len(shown) != len(rows) or not len(rows):
        if len(shown) or len(rows):
            table.value = rows
        return
    changes: dict[str, list[tuple[int, Any]]] = {}
    for name in rows.columns:
        for index, (old, new) in enumerate(zip(shown[name], rows[name], strict=True)):
            if old != new:
                changes.setdefault(name, []).append((index, new))
    if changes:
        table.patch(changes)


def _css(theme: Theme) -> str:
    return f"""
    :host {{ color: {theme.text}; }}
    .tabulator, .tabulator .tabulator-header, .tabulator .tabulator-header .tabulator-col,
    .tabulator .tabulator-tableholder .tabulator-table, .tabulator-row,
    .tabulator .tabulator-tableholder, .tabulator .tabulator-footer {{
      background-color: {theme.card} !important; color: {theme.text}; border-color: {theme.line};
      font-family: {FONT}; font-size: 13px;
    }}
    .tabulator, .tabulator .tabulator-header, .tabulator .tabulator-header .tabulator-col,
    .tabulator-row, .tabulator-row .tabulator-cell {{ border: none !important; }}
    .tabulator .tabulator-header, .tabulator-row {{
      border-bottom: 1px solid {theme.line} !important; }}
    .tabulator .tabulator-header .tabulator-col {{ color: {theme.muted}; font-weight: 500; }}
    .tabulator-row .tabulator-cell {{ padding: 6px 8px; }}
    .tabulator .tabulator-footer, .tabulator .tabulator-footer .tabulator-page {{
      color: {theme.text}; background: {theme.card}; border-color: {theme.line}; }}
    .tabulator-row.tabulator-selectable:hover, .tabulator-row.tabulator-selected,
    .tabulator-row.tabulator-selected:hover {{
      background-color: {theme.line} !important; color: {theme.text}; cursor: pointer;
    }}
    """
