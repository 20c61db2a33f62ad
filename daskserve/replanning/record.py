"""The journal of decisions: appended as they are made, read by dashboards and people."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from daskserve.errors import ConfigError
from daskserve.replanning.decision import Decision


class Journal:
    """Keeps decisions, in a file too if one is given.

    Parameters
    ----------
    path
        JSON lines, appended to and readable by its owner only; None keeps them in memory alone.
    keep
        Most decisions that are kept in memory.
    """

    def __init__(self, path: str | Path | None = None, keep: int = 1000) -> None:
        self._path = Path(path) if path is not None else None
        self._keep = keep
        self._decisions: dict[int, Decision] = {}
        self._next_id = 1
        if self._path is not None and self._path.exists():
            self._next_id += max((d.decision_id for d in read_journal(self._path)), default=0)

    @property
    def decisions(self) -> list[Decision]:
        """Those of this run, oldest first, each with its outcome if there is one."""
        return list(self._decisions.values())

    def take_id(self) -> int:
        """The id of the next decision."""
        self._next_id += 1
        return self._next_id - 1

    def write(self, decision: Decision) -> None:
        """A new decision, or a known one with its outcome (ConfigError)."""
        self._decisions[decision.decision_id] = decision
        while len(self._decisions) > self._keep:
            del self._decisions[next(iter(self._decisions))]
        if self._path is None:
            return
        line = json.dumps(decision.to_json(), allow_nan=False) + "\n"
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror or error}") from None


def read_journal(path: str | Path) -> list[Decision]:
    """The decisions of a journal in order, each as it stood last.

    A last line that is cut short, as a crash or a writer at work leaves it, is left out.

    Raises
    ------
    ConfigError
        No such file, or a line that is no decision.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    return _last_of_each(_parsed(path, number, line) for number, line in enumerate(lines, start=1))


def _parsed(path: str | Path, number: int, line: str) -> Decision:
    try:
        return Decision.from_json(json.loads(line))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} line {number} is no decision: {error!r}") from None


def _last_of_each(decisions: Iterable[Decision]) -> list[Decision]:
    last: dict[int, Decision] = {}
    for decision in decisions:
        last[decision.decision_id] = decision
    return list(last.values())
