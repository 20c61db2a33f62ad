"""The ranks of one instance and the connections between them.

No global default group: several groups may live in one process. Every wait ends: with what came,
or with ``InstanceLost`` that names the rank which is dead, silent or failed. After that the group
is over; all of its ranks learn it, since their connections close.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from daskserve.core.placement import Parallelism
from daskserve.errors import InstanceLost, ModelError
from daskserve.workers.parallel.links import Links, Transport

logger = logging.getLogger(__name__)

HEAD = 0
_POLL_S = 0.01
_CARD_POLL_S = 0.0001  # a decode step takes milliseconds
_LOOK_S = 0.1  # between looks at what other ranks say while a card is waited for
_LAST_WORDS_S = 2.0  # for the living to say that they are, once the group is broken
_MAX_WORDS = 500
_NOTICED = "connection lost"
_PLACE = "place"
_POSTED_PER_STAGE = 8  # of one step: hidden states of its parts, and what it is answered by


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a group find each other: the head's key-value store."""

    host: str
    port: int


def open_group(
    parallelism: Parallelism, host: str, timeout_s: float
) -> tuple[Meeting, dist.TCPStore]:
    """The head's store, listening on ``host`` alone; the followers need the meeting to join."""
    listener = socket.create_server((host, 0), backlog=parallelism.num_gpus)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return Meeting(host, port), store


def call_off(store: dist.Store, rank: int = HEAD, words: str = "it was called off") -> None:
    """This rank, or the head, does not want the group any more: whoever waits for it stops."""
    store.set(f"words/{rank}", words[:_MAX_WORDS])


def join_group(meeting: Meeting, rank: int, timeout_s: float) -> dist.TCPStore:
    """A follower's view of the head's store; each rank may join once.

    Raises
    ------
    InstanceLost
        There is no head any more, or this group has had such a rank: the next one will be ours.
    """
    limit = timedelta(seconds=timeout_s)
    where = f"{meeting.host}:{meeting.port}"
    try:
        store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=limit)
        is_taken = store.add(f"joined/{rank}", 1) > 1
    except RuntimeError as error:
        raise InstanceLost(f"no head at {where}: {error}") from error
    if is_taken:
        raise InstanceLost(f"rank {rank} of the group at {where} is taken")
    return store


class RankGroup:
    """One rank's connections to the others; made by all ranks at once.

    One thread at a time.

    Parameters
    ----------
    store
        Of `open_group` on the head, of `join_group` elsewhere.
    parallelism, rank
        Shape of the instance, and which rank this is: ``stage * tp + tp_rank``.
    host
        Address of this host that the other ranks reach.
    timeout_s
        Most seconds without an answer of another rank.
    assembly_s
        Most seconds until all ranks are here.
    transport
        What the sums of a stage and hidden states go over; None: as orders and answers do.

    Raises
    ------
    InstanceLost
        Not all ranks came.
    ModelError
        Their devices do not go together.
    """

    def __init__(
        self,
        store: dist.Store,
        parallelism: Parallelism,
        rank: int,
        *,
        host: str,
        timeout_s: float,
        assembly_s: float,
        transport: Transport | None = None,
    ) -> None:
        self.store = store
        self.parallelism = parallelism
        self.rank = rank
        self.timeout_s = timeout_s
        self.stage, self.tp_rank = divmod(rank, parallelism.tp)
        self.has_failed_rank = False
        """Whether the group is over because a rank raised something, not because it is gone."""
        self._is_over = False
        self._posted: deque[Callable[[], torch.Tensor]] = deque()
        self._most_posted = parallelism.pp * _POSTED_PER_STAGE * parallelism.pp
        self._all = self._peers = None
        self._links: Links | None = None
        self.share(_PLACE, transport.place if transport else "cpu")
        self.meet("here", assembly_s)
        _check_places(self.shared(_PLACE))
        tp, limit = parallelism.tp, timedelta(seconds=timeout_s)
        with self.watched():
            everyone = dist.PrefixStore("all", store)
            self._all = _connect(everyone, rank, self.num_ranks, host, limit)
            if tp > 1:
                peers = dist.PrefixStore(f"stage-{self.stage}", store)
                self._peers = _connect(peers, self.tp_rank, tp, host, limit)
        if transport is not None:
            self._link(transport, assembly_s)

    @property
    def num_ranks(self) -> int:
        return self.parallelism.num_gpus

    @property
    def is_first(self) -> bool:
        """Whether this rank is of the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.parallelism.pp - 1

    @property
    def last_ranks(self) -> range:
        """The ranks of the last stage."""
        return range(self.num_ranks - self.parallelism.tp, self.num_ranks)

    def neighbour(self, num_stages: int) -> int:
        """The rank with our tensor-parallel rank so many stages on."""
        return self.rank + num_stages * self.parallelism.tp

    def reduce_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of this stage, in place."""
        if self.parallelism.tp > 1:
            with self.watched():
                if self._links is not None:
                    self._links.reduce(tensor)
                else:
                    self._peers.allreduce([tensor]).wait()
        return tensor

    def hand_on(self, hidden: torch.Tensor, tag: int) -> None:
        """Send hidden states, which stay as they are, to the next stage."""
        if self._links is None:
            self.post(hidden, self.neighbour(1), tag)
            return
        with self.watched():
            self._links.send(hidden)

    def handed_on(self, hidden: torch.Tensor, tag: int) -> Callable[[], torch.Tensor]:
        """Hidden states of the previous stage; what is returned is called in their order."""
        links = self._links
        if links is None:
            return self.receive(hidden, self.neighbour(-1), tag)

        def arrived() -> torch.Tensor:
            with self.watched():
                links.receive(hidden)
            return hidden

        return arrived

    def post(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        """Send a tensor that stays as it is, and go on; waits only for one posted long ago."""
        self._posted.append(self.send(tensor, rank, tag))
        if len(self._posted) > self._most_posted:
            self._posted.popleft()()

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Callable[[], torch.Tensor]:
        """Start sending; the tensor must stay as it is until what is returned has been called."""
        return self._start(self._all.send, tensor, rank, tag)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Callable[[], torch.Tensor]:
        """Start receiving; what is returned waits and gives the tensor."""
        return self._start(self._all.recv, tensor, rank, tag)

    def meet(self, name: str, timeout_s: float) -> None:
        """Until every rank has come to the point ``name``; as soon as one fails, fail too."""
        keys = [f"{name}/{rank}" for rank in range(self.num_ranks)]
        with self.watched():
            self.store.set(keys[self.rank], "here")
        late = f"not all ranks were {name} after {timeout_s:g} s"
        self._poll(lambda: self.store.check(keys), timeout_s, late, _POLL_S, 0)

    def until(self, is_done: Callable[[], bool]) -> None:
        """Wait for what no connection tells of: a card, whose work hangs when a rank is gone."""
        late = f"the card was not done after {self.timeout_s:g} s"
        self._poll(is_done, self.timeout_s, late, _CARD_POLL_S, _LOOK_S)
        if self._is_over:  # what hung has been aborted, and nothing has come of it
            raise InstanceLost(f"the group of {self.parallelism} is over")

    def share(self, name: str, text: str) -> None:
        """Tell the other ranks something; `shared` reads it after a `meet`."""
        with self.watched():
            self.store.set(f"{name}/{self.rank}", text)

    def shared(self, name: str) -> tuple[str, ...]:
        """What each rank told."""
        with self.watched():
            return tuple(self.store.get(f"{name}/{r}").decode() for r in range(self.num_ranks))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turns what a broken connection raises inside into ``InstanceLost`` and ends the group."""
        if self._is_over:
            raise InstanceLost(f"the group of {self.parallelism} is over")
        try:
            yield
        except (RuntimeError, OSError) as error:  # gloo and the store raise RuntimeError
            raise self._lost(self._lost_ranks, _NOTICED, error) from error

    def fail(self, error: Exception) -> InstanceLost:
        """End the group because of an error of this rank; returns what to raise."""
        if isinstance(error, InstanceLost):
            return error
        words = f"{type(error).__name__}: {error}"
        return self._lost(lambda: [f"rank {self.rank} failed: {words}"], words, error)

    def close(self) -> None:
        """Cut the connections; the other ranks notice."""
        self._is_over = True
        links, self._links = self._links, None
        if links is not None:
            links.abort()
        for group in (self._peers, self._all):
            if group is not None:
                group.abort()
        self._posted.clear()
        self._all = self._peers = None  # the sockets close with the last reference

    def _link(self, transport: Transport, timeout_s: float) -> None:
        """Connect the devices; on a thread, since NCCL knows no deadline while it connects."""
        errors: list[Exception] = []

        def connect() -> None:
            try:
                self._links = Links(transport, self.store, self.parallelism, self.rank)
                self._links.greet()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=connect, name="rank links", daemon=True)
        thread.start()
        late = f"the ranks' devices were not connected after {timeout_s:g} s"
        self._poll(lambda: not thread.is_alive(), timeout_s, late, _POLL_S, _LOOK_S)
        if errors:
            with self.watched():
                raise errors[0]

    def _poll(
        self, is_done: Callable[[], bool], timeout_s: float, late: str, poll_s: float, look_s: float
    ) -> None:
        """Until ``is_done``; fail when another rank gives up, looked at every ``look_s``."""
        with self.watched():
            started_at = looked_at = time.monotonic()
            while not is_done():
                now = time.monotonic()
                if now - started_at > timeout_s:
                    raise TimeoutError(late)
                if now - looked_at >= look_s:
                    if any(self._words()):
                        raise ConnectionError("another rank gave up")
                    looked_at = now
                time.sleep(poll_s)

    def _start(
        self, operation: Any, tensor: torch.Tensor, rank: int, tag: int
    ) -> Callable[[], torch.Tensor]:
        with self.watched():
            work = operation([tensor], rank, tag)

        def wait() -> torch.Tensor:
            with self.watched():
                work.wait()
            return tensor

        return wait

    def _lost(
        self, find_reasons: Callable[[], list[str]], words: str, error: Exception
    ) -> InstanceLost:
        try:
            self.store.set(f"words/{self.rank}", words[:_MAX_WORDS])
        except RuntimeError:
            logger.warning("the head of the group of %s is gone", self.parallelism)
        self.close()
        reasons = "; ".join(find_reasons()) or f"a connection broke ({str(error)[:_MAX_WORDS]})"
        return InstanceLost(f"the group of {self.parallelism} is lost: {reasons}")

    def _words(self) -> list[str]:
        """What each rank said when it gave up; empty for those that have not."""
        keys = [f"words/{rank}" for rank in range(self.num_ranks)]
        return [self.store.get(k).decode() if self.store.check([k]) else "" for k in keys]

    def _lost_ranks(self) -> list[str]:
        """Whose fault it is: those that failed by themselves, else those that say nothing more.

        Whoever lives notices that the group is broken, and says so.
        """
        deadline = time.monotonic() + _LAST_WORDS_S
        try:
            words = self._words()
            while not all(words) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                words = self._words()
        except RuntimeError:  # the store is the head's
            return [f"rank {HEAD} is dead"]
        suspects = [(rank, text) for rank, text in enumerate(words) if text != _NOTICED]
        failed = [f"rank {rank} failed: {text}" for rank, text in suspects if text]
        self.has_failed_rank = bool(failed)
        return failed or [f"rank {rank} is dead or silent" for rank, _ in suspects]


def _check_places(places: tuple[str, ...]) -> None:
    """Where the ranks compute: all on CPUs, or each on a card of its own (ModelError)."""
    kinds = {place.split()[0] for place in places}
    shown = ", ".join(f"rank {rank} {place}" for rank, place in enumerate(places))
    if len(kinds) > 1:
        raise ModelError(f"the ranks are on unlike devices: {shown}; set device for all of them")
    if kinds != {"cpu"} and len(set(places)) < len(places):
        raise ModelError(f"every rank needs a card of its own: {shown}")


def _connect(
    store: dist.Store, rank: int, size: int, host: str, timeout: timedelta
) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)
