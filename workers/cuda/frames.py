"""KV that goes from device to device: frames of memory that never pass through the host.

UCXX sends whatever has ``__cuda_array_interface__`` as it lies on the device, and receives into
buffers of RMM; Dask's side of it is `daskserve.service.kv_frames`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

import torch

from daskserve.core.kv import KVFrame
from daskserve.errors import KVUnavailable
from daskserve.workers.cuda.staging import CopyStream
from daskserve.workers.kv_pool import runs_of

_FRAME_BYTES = 2**26  # between two looks at the deadline; Dask would cut larger ones


class PageRuns:
    """Pages as contiguous pieces of device memory, to be sent or filled in order.

    Parameters
    ----------
    raw
        uint8 ``[pages, bytes of a page]``.
    page_ids
        In token order.
    copies
        Fills them.
    """

    def __init__(self, raw: torch.Tensor, page_ids: Sequence[int], copies: CopyStream) -> None:
        self._raw = raw
        self._page_ids = page_ids
        self._copies = copies
        self._unfilled = list(self._runs())

    def frames(self) -> Iterator[KVFrame]:
        """The pages' own memory, no copy."""
        for run in self._runs():
            for piece in run.split(_FRAME_BYTES):
                yield KVFrame(piece)

    def fill(self, frame: KVFrame) -> None:
        """Copy a frame to where the last one ended; the frame may go afterwards.

        Raises
        ------
        KVUnavailable
            It is not device memory, or more than there is room for.
        """
        if not hasattr(frame.data, "__cuda_array_interface__"):
            raise KVUnavailable("a frame of KV is not in device memory")
        data = torch.as_tensor(frame.data, device=self._raw.device).view(torch.uint8).view(-1)
        self._fill(data)

    def _fill(self, data: torch.Tensor) -> None:
        while data.numel():
            if not self._unfilled:
                raise KVUnavailable("more KV than was asked for")
            target = self._unfilled[0]
            size = min(target.numel(), data.numel())
            self._copies.copy(target[:size], data[:size])
            data = data[size:]
            self._unfilled[0] = target[size:]
            if not self._unfilled[0].numel():
                del self._unfilled[0]
        self._copies.mark().wait()

    def _runs(self) -> Iterator[torch.Tensor]:
        for first, last in runs_of(self._page_ids):
            yield self._raw[first : last + 1].view(-1)


def can_receive(device: torch.device) -> bool:
    """Whether frames can arrive in this device's memory: UCXX asks RMM for it."""
    return device.type == "cuda" and importlib.util.find_spec("rmm") is not None
