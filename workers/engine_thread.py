"""Drives an engine on a thread of its own: commands in, events out, one call per step."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from daskserve.errors import EngineStepFailed
from daskserve.workers.engine import Engine, Event

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
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
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
        self._inbox.put(command)

    def stop(self) -> None:
        """End the thread after the step under way; blocks until it has ended."""
        self._inbox.put(None)
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
        is_busy = False
        while True:
            for command in self._commands(engine, is_busy):
                if command is None:
                    return
                self._guarded(engine, command)
            step = self._guarded(engine, engine.schedule)
            self._flush(engine)
            is_busy = step is not None
            if is_busy:
                self._guarded(engine, partial(engine.execute, step))
                self._flush(engine)

    def _commands(self, engine: Engine, is_busy: bool) -> list[Command | None]:
        """All that has come in; waits for the first one, or the next expiry, when idle."""
        commands: list[Command | None] = []
        expires_at = engine.holding.next_expiry_at()
        wait_s = None if expires_at is None else max(expires_at - engine.clock(), 0.0)
        try:
            if not is_busy:
                commands.append(self._inbox.get(timeout=wait_s))
            while True:
                commands.append(self._inbox.get_nowait())
        except queue.Empty:
            return commands

    def _guarded(self, engine: Engine, action: Callable[[], T]) -> T | None:
        """A bug in the bookkeeping fails what is under way, not the instance."""
        try:
            return action()
        except Exception as error:
            logger.exception("%s failed between steps", self._name)
            cause = f"{type(error).__name__}: {error}"
            engine.abort_all(EngineStepFailed(f"the engine failed: {cause}"))
            return None

    def _flush(self, engine: Engine) -> None:
        if engine.events:
            events, engine.events = engine.events, []
            self._on_events(events)
