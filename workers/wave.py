"""Sequences whose tokens are computed together, step after step.

An instance has as many waves as its pipeline has stages (the simulator's lanes): while the tokens
of one are sampled, another is in the next stage.
"""

from __future__ import annotations

from daskserve.workers.decode_batch import DecodeBatch
from daskserve.workers.sequence import Sequence


class Wave:
    """Sequences with pages. While a step of theirs is open its rows stay as they are.

    Parameters
    ----------
    max_rows
        Most sequences that decode together.
    block_size
        Tokens per page.
    """

    def __init__(self, max_rows: int, block_size: int) -> None:
        self.max_rows = max_rows
        self.running = DecodeBatch(max_rows, block_size)
        self.computing: list[Sequence] = []
        self.num_members = 0
        """Sequences with pages here: their KV is pulled or computed, or they run."""
        self.is_open = False
        """Whether a step of this wave is begun and not yet ended."""
        self._joining: list[tuple[Sequence, list[int]]] = []
        self._leaving: list[Sequence] = []

    def join(self, sequence: Sequence, pages: list[int]) -> None:
        """Into the decode batch, from the next step on."""
        if self.is_open:
            self._joining.append((sequence, pages))
        else:
            self.running.add(sequence, pages)

    def leave(self, sequence: Sequence) -> None:
        """Out of the decode batch; a row of an open step stays, for nobody, until its end."""
        joining = [entry for entry in self._joining if entry[0] is not sequence]
        if len(joining) < len(self._joining):
            self._joining = joining
        elif self.is_open:
            self._leaving.append(sequence)
        else:
            self.running.remove(sequence)

    def end_step(self) -> None:
        """The step is over: who wanted to leave or to join does so."""
        self.is_open = False
        for sequence in self._leaving:
            self.running.remove(sequence)
        for sequence, pages in self._joining:
            self.running.add(sequence, pages)
        self._leaving.clear()
        self._joining.clear()
