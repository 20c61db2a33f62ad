"""Drives an engine on a thread of its own: commands in, events out, one call per step."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from daskserve.errors import EngineStepFailed
from daskserve.workers.engine import Engine, Event
from daskserve.workers.sequence import Sequence

logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[], object]

_JOIN_TIMEOUT_S = 30.0


class EngineThread:
    """Runs steps while there is work; sleeps until a command or the next expiry otherwise.

    Parameters
    ----------
    name
        Of the thread.
    on_events
        Called on the thread with all that happened since the last call.
    on_death
        Called on the thread as its last act, with what ended it; None after ``stop``.
    """

    def __init__(
        self,
        name: str,
        on_events: Callable[[list[Event]], None],
        on_death: Callable[[BaseException | None], None],
    ) -> None:
        self._name = name
        self._on_events = on_events
        self._on_death = on_death
        self._inbox: deque[Command | None] = deque()
        self._notes: deque[Command] = deque()
        self._has_mail = threading.Event()
        # Held whenever those are emptied or the engine's books change.
        self._books = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, build: Callable[[], Engine]) -> Engine:
        """Build the engine on the thread, so that its thread pools are set up there; blocks."""
        ready: Future[Engine] = Future()
        self._thread = threading.Thread(
            target=self._main, args=(build, ready), name=self._name, daemon=True
        )
        self._thread.start()
        return ready.result()

    def post(self, command: Command) -> None:
        """Have the engine's thread call this between two steps. Any thread."""
        self._inbox.append(command)
        self._has_mail.set()

    def note(self, command: Command) -> None:
        """The same for what has happened, which a request may overtake."""
        self._notes.append(command)
        self._has_mail.set()

    def try_now(self, engine: Engine, sequence: Sequence) -> list[Event] | None:
        """Have the engine take a request beside the step under way; None if that cannot be.

        Returns what has happened, which is not reported otherwise. Any thread; never blocks.
        """
        if not self._books.acquire(blocking=False):
            return None
        try:
            # What was posted before goes first.
            if self._inbox or not engine.add_early(sequence):
                return None
            events, engine.events = engine.events, []
        except Exception as error:
            logger.exception("%s failed beside a step", self._name)
            self.post(partial(engine.abort_all, _failure(error)))
            raise
        finally:
            self._books.release()
        self._has_mail.set()  # there may be something to compute for an engine that sleeps
        return events

    def stop(self) -> None:
        """End the thread after the steps under way; blocks until it has ended."""
        self._inbox.append(None)
        self._has_mail.set()
        if self._thread is not None:
            self._thread.join(_JOIN_TIMEOUT_S)

    def _main(self, build: Callable[[], Engine], ready: Future[Engine]) -> None:
        try:
            engine = build()
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(engine)
        death = None
        try:
            self._serve(engine)
        except BaseException as error:
            logger.exception("%s died", self._name)
            death = error
        self._flush(engine)
        self._on_death(death)

    def _serve(self, engine: Engine) -> None:
        is_busy = is_stopping = False
        while not is_stopping or is_busy:
            if not is_busy:
                self._sleep(engine)
            step = None
            with self._books:
                while self._notes:
                    self._guarded(engine, self._notes.popleft())
                while self._inbox:
                    command = self._inbox.popleft()
                    if command is None:
                        is_stopping = True
                    else:
                        self._guarded(engine, command)
                if not is_stopping:
                    step = self._guarded(engine, engine.schedule)
                self._flush(engine)
            is_busy = step is not None or len(engine.open_steps) > 0
            if step is not None:
                engine.begin(step)
            if engine.open_steps.is_full or (step is None and is_busy):
                self._finish(engine)

    def _finish(self, engine: Engine) -> None:
        step, computed = engine.finish()
        with self._books:
            self._guarded(engine, partial(engine.conclude, step, computed))
            self._flush(engine)

    def _sleep(self, engine: Engine) -> None:
        """Until a command comes, or the next expiry."""
        expires_at = engine.holding.next_expiry_at()
        wait_s = None if expires_at is None else max(expires_at - engine.clock(), 0.0)
        self._has_mail.wait(wait_s)
        self._has_mail.clear()

    def _guarded(self, engine: Engine, action: Callable[[], T]) -> T | None:
        """A bug in the bookkeeping fails what is under way, not the instance."""
        try:
            return action()
        except Exception as error:
            logger.exception("%s failed between steps", self._name)
            engine.abort_all(_failure(error))
            return None

    def _flush(self, engine: Engine) -> None:
        if engine.events:
            events, engine.events = engine.events, []
            self._on_events(events)


def _failure(error: Exception) -> EngineStepFailed:
    return EngineStepFailed(f"the engine failed: {type(error).__name__}: {error}")
