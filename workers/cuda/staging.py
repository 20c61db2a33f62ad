"""Copies between host and device that nobody waits for: pinned memory and streams of their own.

On the CPU as device the same calls copy at once, so that whoever uses them is the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Mark:
    """A point in a stream's work."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        """Block this thread until the device has come here."""
        if self._event is not None:
            self._event.synchronize()

    def is_reached(self) -> bool:
        """Whether it has."""
        return self._event is None or self._event.query()


class CopyStream:
    """A stream beside the one that computes. Any thread may use it.

    Parameters
    ----------
    device
        Where the other end of the copies is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.is_cuda else None

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 on the host, pinned where that makes copies asynchronous.

        PyTorch keeps pinned memory for the next one that asks, but not before the copies that
        were started on it are done.
        """
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.is_cuda)

    @contextmanager
    def active(self) -> Iterator[None]:
        """What is started inside runs on this stream."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy; `mark` tells when it is done."""
        with self.active():
            target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """The end of what was started so far."""
        if self._stream is None:
            return Mark(None)
        event = torch.cuda.Event()
        event.record(self._stream)
        return Mark(event)


def mark_now(device: torch.device) -> Mark:
    """The end of what this thread has started on the device so far."""
    if device.type != "cuda":
        return Mark(None)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return Mark(event)


class Fetch:
    """Copies on their way to the host.

    Parameters
    ----------
    copies
        Where they go.
    mark
        When they are there.
    """

    def __init__(self, copies: list[torch.Tensor], mark: Mark) -> None:
        self._copies = copies
        self._mark = mark

    def is_done(self) -> bool:
        return self._mark.is_reached()

    def __call__(self) -> list[torch.Tensor]:
        """Wait for them."""
        self._mark.wait()
        return self._copies


def start_fetch(*tensors: torch.Tensor) -> Fetch:
    """Start copying to the host what this thread has computed."""
    device = tensors[0].device
    if device.type != "cuda":
        return Fetch(list(tensors), Mark(None))
    copies = []
    for tensor in tensors:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copies.append(copy.copy_(tensor, non_blocking=True))
    return Fetch(copies, mark_now(device))
