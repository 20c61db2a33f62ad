"""The KV pool of an engine on a device: the same books and pages, copied out and in by streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from daskserve.core.kv import Chunks, KVStream
from daskserve.core.shards import Shard
from daskserve.workers.cuda.digest import device_digests
from daskserve.workers.cuda.frames import PageRuns, can_receive
from daskserve.workers.cuda.staging import CopyStream, Mark
from daskserve.workers.forward import ModelShape
from daskserve.workers.kv_pool import KVPool, runs_of

_CHUNK_BYTES = 2**22  # on the way between host and device at a time
_AHEAD = 2  # chunks that are copied while one is sent


class DevicePool(KVPool):
    """Pages in the memory of a device.

    What copies KV out or in may be called on any thread: it uses a stream of its own, so that no
    step of the engine waits for it.

    Parameters
    ----------
    shape, dtype, num_blocks, block_size, shard
        As for `KVPool`.
    device
        Where the pages are; on ``cpu`` all copies are plain ones.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        self.device = device
        super().__init__(shape, dtype, num_blocks, block_size, shard)
        self.copies = CopyStream(device)

    def _make_pages(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def slice_digests(self, page_ids: Sequence[int], shard: Shard | None = None) -> np.ndarray:
        # Beside the steps: this is also asked on other threads, of KV that has just come.
        with self.copies.active():
            return device_digests(self.pages, page_ids, self.shard, shard or self.shard)

    def outgoing(self, page_ids: Sequence[int]) -> KVStream:
        self._check_ids(page_ids)
        return KVStream(
            len(page_ids) * self.page_bytes,
            self._copied_out(page_ids),
            PageRuns(self._raw, page_ids, self.copies) if self.device.type == "cuda" else None,
        )

    def incoming(self, page_ids: Sequence[int]) -> KVStream:
        self._check_ids(page_ids)
        return KVStream(
            len(page_ids) * self.page_bytes,
            self._copied_in(page_ids),
            PageRuns(self._raw, page_ids, self.copies) if can_receive(self.device) else None,
        )

    def read_slices(
        self, page_ids: Sequence[int], layers: slice, heads: slice, out: np.ndarray
    ) -> None:
        with self.copies.active():
            ids = torch.as_tensor(np.asarray(page_ids, np.int64)).to(self.device)
            piece = self.pages[:, layers, :, heads][ids].contiguous().view(torch.uint8)
            torch.from_numpy(out).copy_(piece.view(-1))

    def write_slices(
        self, page_ids: Sequence[int], layers: slice, heads: slice, data: np.ndarray
    ) -> None:
        # A copy: what came may be read-only, which PyTorch's tensors cannot be.
        piece = torch.tensor(data.view(np.uint8).reshape(-1))
        with self.copies.active():
            ids = torch.as_tensor(np.asarray(page_ids, np.int64)).to(self.device)
            target = self.pages[:, layers, :, heads]
            target[ids] = piece.to(self.device).view(self.pages.dtype).view(-1, *target.shape[1:])
        self.copies.mark().wait()

    @property
    def _raw(self) -> torch.Tensor:
        """uint8 ``[blocks + 1, bytes of a page]``."""
        return self.pages.view(torch.uint8).view(self.pages.shape[0], -1)

    def _chunks(self, page_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        step = max(_CHUNK_BYTES // self.page_bytes, 1)
        for start in range(0, len(page_ids), step):
            yield page_ids[start : start + step]

    def _copied_out(self, page_ids: Sequence[int]) -> Chunks:
        ready: deque[tuple[torch.Tensor, Mark]] = deque()
        for ids in self._chunks(page_ids):
            buffer = self.copies.host_buffer(len(ids) * self.page_bytes)
            for place, run in self._placed(buffer, ids):
                self.copies.copy(place, run)
            ready.append((buffer, self.copies.mark()))
            if len(ready) > _AHEAD:
                yield _when_done(*ready.popleft())
        while ready:
            yield _when_done(*ready.popleft())

    def _copied_in(self, page_ids: Sequence[int]) -> Chunks:
        try:
            for ids in self._chunks(page_ids):
                buffer = self.copies.host_buffer(len(ids) * self.page_bytes)
                yield memoryview(buffer.numpy())
                for place, run in self._placed(buffer, ids):
                    self.copies.copy(run, place)
        finally:
            # Afterwards nothing writes to the pages, and a step may read them.
            self.copies.mark().wait()

    def _placed(
        self, buffer: torch.Tensor, page_ids: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of a host buffer with the memory on the device that belongs to each."""
        raw, start = self._raw, 0
        for first, last in runs_of(page_ids):
            run = raw[first : last + 1].view(-1)
            yield buffer[start : start + run.numel()], run
            start += run.numel()


def _when_done(buffer: torch.Tensor, mark: Mark) -> memoryview:
    mark.wait()
    return memoryview(buffer.numpy())
