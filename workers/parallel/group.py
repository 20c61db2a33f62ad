"""The ranks of one instance and the connections between them.

No global default group: several groups may live in one process. Every wait ends: with what came,
or with ``InstanceLost`` that names the rank which is dead, silent or failed. After that the group
is over; all of its ranks learn it, since their connections close.
"""

from __future__ import annotations

import logging
import socket
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
from daskserve.errors import InstanceLost

logger = logging.getLogger(__name__)

HEAD = 0
_POLL_S = 0.01
_LAST_WORDS_S = 2.0  # for the living to say that they are, once the group is broken
_MAX_WORDS = 500
_NOTICED = "connection lost"
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


def call_off(store: dist.Store) -> None:
    """The head does not want the group any more: whoever waits for it stops."""
    store.set(f"words/{HEAD}", "it was called off")


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

    Raises
    ------
    InstanceLost
        Not all ranks came.
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
        self.meet("here", assembly_s)
        tp, limit = parallelism.tp, timedelta(seconds=timeout_s)
        with self.watched():
            everyone = dist.PrefixStore("all", store)
            self._all = _connect(everyone, rank, self.num_ranks, host, limit)
            if tp > 1:
                peers = dist.PrefixStore(f"stage-{self.stage}", store)
                self._peers = _connect(peers, self.tp_rank, tp, host, limit)

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
                self._peers.allreduce([tensor]).wait()
        return tensor

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
            deadline = time.monotonic() + timeout_s
            while not self.store.check(keys):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not all ranks were {name} after {timeout_s:g} s")
                if any(self._words()):
                    raise ConnectionError("another rank gave up")
                time.sleep(_POLL_S)

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
        for group in (self._peers, self._all):
            if group is not None:
                group.abort()
        self._posted.clear()
        self._all = self._peers = None  # the sockets close with the last reference

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


def _connect(
    store: dist.Store, rank: int, size: int, host: str, timeout: timedelta
) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)
