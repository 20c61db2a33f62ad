"""Simulated plans in a process of their own: one at a time, the latest question first.

The process keeps its compiled simulator warm. Between two simulations it looks whether the
question it works on is still asked; the pages stay quick whatever it does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from daskserve.dashboards.question import Question
from daskserve.errors import DaskserveError
from daskserve.planner.plan_record import PlanRecord

_KEPT = 64
_LOOK_S = 0.2
_NICE = 10


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a plan is: how many simulations are done, of which stage."""

    stage: str
    num_done: int


Tell = Callable[[Progress | PlanRecord | str], None]
"""Gets progress, then the plan, or a sentence on why there is none. On the refiner's thread."""


class Refiner:
    """Plans for all sessions; each has at most one question open."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._open: OrderedDict[object, tuple[Question, Tell]] = OrderedDict()
        self._done: OrderedDict[Question, PlanRecord] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def ask(self, owner: object, question: Question, tell: Tell) -> None:
        """Have a question answered; an earlier one of the same owner is dropped."""
        with self._lock:
            self._open.pop(owner, None)
            known = self._done.get(question)
            if known is None:
                self._open[owner] = (question, tell)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="plans", daemon=True)
                    self._thread.start()
                self._lock.notify_all()
        if known is not None:
            tell(known)

    def drop(self, owner: object) -> None:
        """Nobody waits any more."""
        with self._lock:
            self._open.pop(owner, None)

    def close(self) -> None:
        with self._lock:
            self._is_over = True
            self._open.clear()
            self._lock.notify_all()

    # On the refiner's thread.

    def _run(self) -> None:
        worker: _Worker | None = None
        while (job := self._next()) is not None:
            owner, question, tell = job
            if worker is None or not worker.is_alive:
                worker = _Worker()
            self._answer(worker, owner, question, tell)
        if worker is not None:
            worker.stop()

    def _next(self) -> tuple[object, Question, Tell] | None:
        with self._lock:
            while not self._open and not self._is_over:
                self._lock.wait()
            if self._is_over:
                return None
            owner, (question, tell) = next(reversed(self._open.items()))
            return owner, question, tell

    def _is_asked(self, owner: object, question: Question) -> bool:
        with self._lock:
            return self._open.get(owner, (None, None))[0] == question

    def _answer(self, worker: _Worker, owner: object, question: Question, tell: Tell) -> None:
        worker.pipe.send(question)
        is_stopped = False
        while True:
            try:
                if not worker.pipe.poll(_LOOK_S):
                    if not is_stopped and not self._is_asked(owner, question):
                        worker.pipe.send("stop")
                        is_stopped = True
                    continue
                said = worker.pipe.recv()
            except (EOFError, OSError):
                said = "the planner's process died; ask again"
            is_asked = self._is_asked(owner, question)
            if isinstance(said, PlanRecord):
                with self._lock:
                    self._done[question] = said
                    while len(self._done) > _KEPT:
                        self._done.popitem(last=False)
            if not isinstance(said, Progress) and is_asked:
                self.drop(owner)
            if is_asked and said is not None:
                tell(said)
            if not isinstance(said, Progress):
                return
            if not is_asked and not is_stopped:
                worker.pipe.send("stop")
                is_stopped = True


class _Worker:
    """The process and our end of its pipe."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def stop(self) -> None:
        self.pipe.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()


# In the process.


class _Stopped(Exception):
    """The question is no longer asked."""


class _Steps:
    """An executor that tells how far it is and stops when told to."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._num_done = pipe, 0
        self.stage = "placements are simulated"

    def map(self, function: Any, *iterables: Iterable[Any]) -> list[Any]:
        results = []
        for arguments in zip(*iterables, strict=True):
            if self._pipe.poll():
                raise _Stopped(self._pipe.recv())
            results.append(function(*arguments))
            self._num_done += 1
            self._pipe.send(Progress(self.stage, self._num_done))
        return results


def _work(pipe: Connection) -> None:
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the dashboard, whose end is ours
    try:
        while True:
            question = pipe.recv()
            if isinstance(question, Question):  # "stop" is for what has been answered meanwhile
                pipe.send(_answer_of(question, pipe))
    except (EOFError, OSError):
        return  # the dashboard has gone


def _answer_of(question: Question, pipe: Connection) -> PlanRecord | str | None:
    try:
        return _planned(question, _Steps(pipe))
    except _Stopped:
        return None
    except DaskserveError as error:
        return str(error)
    except (EOFError, OSError):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _planned(question: Question, steps: _Steps) -> PlanRecord:
    from daskserve.planner.plan_record import record_of
    from daskserve.planner.planning import plan

    request = question.request()
    answer = plan(request, steps)
    steps.stage = "curves are simulated"
    return record_of(answer, request, question.to_record(), steps)
