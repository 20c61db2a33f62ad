"""What the planner answers: a placement, the ways it was compared with, and why."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field

import numpy as np
import xarray as xr

from daskserve.core.instance import Role
from daskserve.core.placement import Placement
from daskserve.core.slo import SLO
from daskserve.planner.goodput import Goodput
from daskserve.planner.search.algorithms import Solution
from daskserve.planner.search.links import KVTraffic
from daskserve.planner.slo_classes import AnySLO, ClassShare, SLOClasses

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, eq=False)
class Option:
    """One way to serve the workload.

    Parameters
    ----------
    name
        ``Algorithm 1, pooled``, ``Algorithm 3``, ``colocated``, ``one parallelism``, ...
    solution
        Instances and counts; None when nothing was found.
    placement
        Where every rank runs; None when the cluster is too small.
    goodput
        Of the whole deployment, as far as it was looked at.
    price_per_hour
        Dollars for the GPUs that are used.
    traffic
        KV over the network; None where there is none.
    rejected
        Why it cannot be used; empty when it can.
    is_too_large
        It would meet the SLO on a larger cluster.
    classes
        What each class of requests attains at the rate: with the seed that attained the least,
        or where a goodput was looked for at the highest rate that was met.
    """

    name: str
    solution: Solution | None = None
    placement: Placement | None = None
    goodput: Goodput | None = None
    price_per_hour: float = float("nan")
    traffic: KVTraffic | None = None
    rejected: str = ""
    is_too_large: bool = False
    classes: tuple[ClassShare, ...] = ()

    @property
    def is_usable(self) -> bool:
        return self.placement is not None and not self.rejected

    @property
    def num_gpus(self) -> int:
        return self.solution.num_gpus if self.solution else 0

    @property
    def num_gpus_occupied(self) -> int:
        """GPUs of whole nodes; 0 without a placement."""
        return self.placement.num_gpus_occupied if self.placement else 0

    def __str__(self) -> str:
        if self.solution is None:
            return f"{self.name}: {self.rejected}"
        return f"{self.name}: {self.solution.all_instances}, {self.num_gpus} GPUs"


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """The answer to a plan request.

    Parameters
    ----------
    status
        ``found``, ``infeasible`` (see ``reason``, ``nearest_slo`` and ``highest_rate``) or
        ``no_data``.
    rate
        Requests/s planned for; for the highest rate of a cluster, that rate.
    chosen
        The cheapest usable option.
    options
        Everything compared, cheapest usable first.
    tokens_per_request
        Mean of prompt and output together, for the price per token.
    is_highest
        The GPUs were given and the rate was looked for.
    nearest_slo
        What could be met if nothing meets the asked SLO.
    highest_rate
        What the cluster can serve if it is too small for the asked rate.
    explanation
        Sentences, the most important first.
    """

    status: str
    rate: float
    slo: AnySLO
    chosen: Option | None = None
    options: tuple[Option, ...] = ()
    tokens_per_request: float = float("nan")
    reason: str = ""
    nearest_slo: SLO | dict[str, SLO] | None = None
    highest_rate: float | None = None
    explanation: tuple[str, ...] = field(default=())
    is_highest: bool = False

    @property
    def placement(self) -> Placement | None:
        return self.chosen.placement if self.chosen else None

    def price_per_million_tokens(self, option: Option) -> float:
        """Dollars per million prompt and output tokens at the planned rate.

        An option that serves less than that is priced at its own rate.
        """
        rate = min(self.rate, option.solution.rate) if option.solution else math.nan
        tokens = rate * self.tokens_per_request * SECONDS_PER_HOUR
        return option.price_per_hour / tokens * 1e6 if tokens > 0 else math.nan

    @property
    def ranking(self) -> xr.Dataset:
        """One row per option, by dimension ``option``; ``attainment`` also by ``slo_class``.

        Attainment is NaN where the option was not simulated at the rate.
        """
        rows = [self._row(option) for option in self.options]
        names = [option.name for option in self.options]
        columns = rows[0] if rows else {}
        data: dict = {name: ("option", np.array([row[name] for row in rows])) for name in columns}
        slo = SLOClasses.of(self.slo)
        shares = [{one.name: one.attainment for one in option.classes} for option in self.options]
        attainment = [[mine.get(name, np.nan) for name in slo.names] for mine in shares]
        shape = len(names), len(slo.names)
        by_class = np.array(attainment, np.float64).reshape(shape)
        data["attainment"] = (("option", "slo_class"), by_class)
        data["target"] = ("slo_class", slo.attainment)
        coords = {"option": names, "slo_class": list(slo.names)}
        return xr.Dataset(data, coords, {"rate": self.rate, "status": self.status})

    def _row(self, option: Option) -> dict:
        unit = option.solution.all_instances if option.solution else None
        row: dict = {"instances": str(unit) if unit else ""}
        for role in Role:
            group = unit.of_role(role) if unit else None
            name = role.lower()
            row[f"num_{name}"] = group.count if group else 0
            row[f"{name}_tp"] = group.parallelism.tp if group else 0
            row[f"{name}_pp"] = group.parallelism.pp if group else 0
        row["num_gpus"] = option.num_gpus
        row["num_gpus_occupied"] = option.num_gpus_occupied
        row["rate"] = option.solution.rate if option.solution else 0.0
        row["price_per_hour"] = option.price_per_hour
        row["price_per_million_tokens"] = self.price_per_million_tokens(option)
        row["is_usable"] = option.is_usable
        row["note"] = option.rejected
        return row

    def __str__(self) -> str:
        head = str(self.chosen) if self.chosen else f"{self.status}: {self.reason}"
        return "\n".join([head, *self.explanation])

    __repr__ = __str__  # what a shell shows; everything else takes pages

    def _repr_html_(self) -> str:
        shown = ("instances", "num_gpus", "num_gpus_occupied", "rate", "price_per_hour",
                 "price_per_million_tokens", "note")  # fmt: skip
        head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in ("option", *shown))
        body = []
        for option in self.options:
            row = self._row(option)
            cells = [option.name, *(_shown(row[name]) for name in shown)]
            style = ' style="font-weight:bold"' if option is self.chosen else ""
            cells_html = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells)
            body.append(f"<tr{style}>{cells_html}</tr>")
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self.explanation)
        title = html.escape(self.reason or f"{self.rate:.4g} requests/s: {self.status}")
        return f"<p>{title}</p><table><tr>{head}</tr>{''.join(body)}</table><ul>{lines}</ul>"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
