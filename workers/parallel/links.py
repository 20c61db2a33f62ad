"""What carries what the model moves between the ranks' cards: sums of a stage, hidden states.

Every tensor-parallel stage has a connection of its own, and so has every pair of ranks that hand
hidden states on. All that a rank moves is ordered on the stream that computes: one operation after
the other, in the order of the program, so that on no card two of them wait for each other. Data
goes from stage to stage only, hence no circle of ranks can wait either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from daskserve.core.placement import Parallelism
from daskserve.errors import ConfigError

Connect = Callable[[dist.Store, int, int], dist.ProcessGroup]
"""Store, rank and number of ranks of one connection."""

_WATCHDOG_TIMEOUTS = 2.0
"""PyTorch's watchdog ends a process whose operation takes so many time-outs. We end the group
after one, but cannot where the driver holds the thread that would."""


@dataclass(frozen=True, slots=True)
class Transport:
    """A way between ranks beside that of orders and answers.

    Parameters
    ----------
    device
        Where tensors are.
    place
        What distinguishes this rank's device from those of others.
    connect
        Makes a connection.
    """

    device: torch.device
    place: str
    connect: Connect


def nccl(device: torch.device, timeout_s: float) -> Transport:
    """Between cards, one card for each rank (ConfigError)."""
    if not dist.is_nccl_available():
        raise ConfigError(
            f"device=cuda: PyTorch {torch.__version__} is built without NCCL, which instances of"
            " several ranks need: install one that has it, or use device=cpu"
        )

    def connect(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s * _WATCHDOG_TIMEOUTS)
        with torch.cuda.device(device):
            return dist.ProcessGroupNCCL(store, rank, size, options)

    return Transport(device, f"cuda {torch.cuda.get_device_properties(device).uuid}", connect)


class Links:
    """One rank's connections; all calls are made by one thread, on the stream that computes.

    On a card they start work and return. Whoever waits for the stream needs a deadline: when a
    rank is gone the work of the others stays on their cards until `abort`.

    Parameters
    ----------
    transport
        Makes the connections.
    store, parallelism, rank
        As for `RankGroup`.
    """

    def __init__(
        self, transport: Transport, store: dist.Store, parallelism: Parallelism, rank: int
    ) -> None:
        self._device = transport.device
        stage, tp_rank = divmod(rank, parallelism.tp)
        self._peers = self._previous = self._next = None

        def connected(name: str, rank: int, size: int) -> dist.ProcessGroup:
            return transport.connect(dist.PrefixStore(f"data/{name}", store), rank, size)

        if parallelism.tp > 1:
            self._peers = connected(f"stage-{stage}", tp_rank, parallelism.tp)
        if stage > 0:
            self._previous = connected(f"after-{stage - 1}/{tp_rank}", 1, 2)
        if stage < parallelism.pp - 1:
            self._next = connected(f"after-{stage}/{tp_rank}", 0, 2)

    def greet(self) -> None:
        """Use every connection once and wait: NCCL connects with the first use."""
        word = torch.zeros(1, device=self._device)
        if self._peers is not None:
            self.reduce(word)
        if self._previous is not None:
            self.receive(word)
        if self._next is not None:
            self.send(word)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks of this stage, in place."""
        self._peers.allreduce([tensor]).wait()

    def send(self, tensor: torch.Tensor) -> None:
        """To the next stage; the tensor may go afterwards."""
        self._next.send([tensor], 1, 0).wait()

    def receive(self, tensor: torch.Tensor) -> None:
        """Of the previous stage, in the order in which it sends."""
        self._previous.recv([tensor], 0, 0).wait()

    def abort(self) -> None:
        """End all that is under way here, on the card too."""
        for connection in (self._peers, self._previous, self._next):
            if connection is not None:
                connection.abort()
        self._peers = self._previous = self._next = None
