"""KV from the instance that prefilled to the instance that decodes, on a pooled Dask connection.

The puller calls a worker RPC and shows its handle. After a positive answer the pages follow as
raw bytes on the same connection, straight from the holder's pool into the puller's; where a
transport has no byte stream (UCX, in-process) they travel as messages, and between devices over
UCX these hold device memory, which never comes to the host. When all have arrived the puller says
so and the holder frees its pages. Whatever goes wrong becomes ``KVUnavailable`` within the
deadline, and the prompt is computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import numpy as np
from distributed.comm import Comm
from distributed.core import CommClosedError, ConnectionPool, Status
from distributed.protocol import to_serialize
from tornado.iostream import IOStream

from daskserve.core.kv import DeviceFrames, KVFrame, KVHandle, KVStream
from daskserve.core.shards import Shard
from daskserve.errors import KVUnavailable
from daskserve.service.kv_counters import KVCounters
from daskserve.service.kv_frames import SERIALIZERS, carries_device_memory
from daskserve.service.kv_wire import (
    DONE,
    Answer,
    Ask,
    pack_answer,
    pack_ask,
    unpack_answer,
    unpack_ask,
)

OPERATION = "daskserve-kv-pull"
"""Name of the worker handler."""

_PIECE_BYTES = 4 * 2**20  # between two looks at the deadline
_PLAIN = ["msgpack"]

T = TypeVar("T")
Views = list[memoryview] | KVStream
Export = Callable[[KVHandle], Views]
Release = Callable[[str, bytes], None]
ExportPart = Callable[[KVHandle, Shard], Awaitable[tuple[Views, int]]]


async def pull(
    pool: ConnectionPool,
    handle: KVHandle,
    destination: Views,
    *,
    connect_timeout_s: float,
    stall_timeout_s: float,
    address: str | None = None,
    shard: Shard | None = None,
    counters: KVCounters | None = None,
) -> int:
    """Fill ``destination`` with the KV that ``handle`` names; returns its digest when computed.

    Parameters
    ----------
    pool
        The worker's connections (``worker.rpc``).
    handle
        What the prefill returned.
    destination
        Writable bytes in the order of the holder's pages. Nothing writes to them, or asks for the
        next chunk, once this has returned, raised or been cancelled.
    connect_timeout_s, stall_timeout_s
        Most seconds to reach the holder, and without any progress.
    address, shard
        A rank of the holder, and the layers and heads to get from it: they are not freed by
        that. None: everything, from an instance of one rank, which frees it.
    counters
        Told of a pull that ended well.

    Raises
    ------
    KVUnavailable
        Refused, unreachable, stalled or broken off.
    """
    address = address or handle.instance_address
    try:
        async with asyncio.timeout(connect_timeout_s):
            comm = await pool.connect(address, timeout=connect_timeout_s)
    except OSError as error:
        raise KVUnavailable(f"cannot reach {address}: {error}") from error
    is_clean = False
    try:
        digest = await _receive(comm, handle, destination, stall_timeout_s, shard)
        is_clean = True
        if counters is not None:
            counters.add(address, _num_bytes(destination))
        return digest
    except _Refused as refusal:
        is_clean = True
        raise KVUnavailable(f"{address} refused: {refusal}") from None
    except OSError as error:  # closed connections and timeouts too
        raise KVUnavailable(f"the KV pull from {address} broke off: {error!r}") from error
    finally:
        if not is_clean:
            # Closes the socket at once, so that nothing writes to the pages any more.
            comm.abort()
        _end(destination)
        pool.reuse(address, comm)


class _Refused(Exception):
    pass


async def _receive(
    comm: Comm,
    handle: KVHandle,
    destination: Views,
    stall_s: float,
    shard: Shard | None,
) -> int:
    num_bytes = _num_bytes(destination)
    device = _device_frames(comm, destination)
    ask = {"op": OPERATION, "ask": pack_ask(handle, num_bytes, shard, device is not None)}
    await _soon(comm.write(ask, serializers=_PLAIN), stall_s)
    answer = unpack_answer(await _soon(comm.read(deserializers=_PLAIN), stall_s))
    if answer.reason is not None:
        raise _Refused(answer.reason)
    if answer.num_bytes != num_bytes:
        raise KVUnavailable(f"{answer.num_bytes} bytes offered for {num_bytes}")
    if answer.is_raw:
        stream = _byte_stream(comm)
        if stream is None:
            raise KVUnavailable("raw bytes offered on a connection without a byte stream")
        for piece in _pieces(destination):
            await _soon(stream.read_into(piece), stall_s)
    elif answer.is_device:
        await _receive_frames(comm, device, num_bytes, stall_s)
    else:
        await _receive_messages(comm, destination, stall_s)
    await _soon(comm.write(DONE, serializers=_PLAIN), stall_s)
    return answer.digest


async def _receive_frames(
    comm: Comm, device: DeviceFrames | None, num_bytes: int, stall_s: float
) -> None:
    """Memory of the holder's device into that of ours."""
    if device is None:
        raise KVUnavailable("device memory offered to whom has not asked for it")
    while num_bytes > 0:
        frame = _frame_of(await _soon(comm.read(deserializers=SERIALIZERS), stall_s))
        device.fill(frame)
        num_bytes -= frame.data.nbytes


async def _receive_messages(comm: Comm, destination: Views, stall_s: float) -> None:
    """Pieces of bytes, cut without regard to the bounds of our pages."""
    data = np.empty(0, np.uint8)
    for view in _pieces(destination):
        target = np.frombuffer(view, np.uint8)
        while target.size:
            if not data.size:
                data = _bytes_of(await _soon(comm.read(deserializers=SERIALIZERS), stall_s))
            size = min(target.size, data.size)
            target[:size] = data[:size]
            target, data = target[size:], data[size:]
    if data.size:
        raise KVUnavailable("more KV than was asked for")


def _frame_of(message: object) -> KVFrame:
    frame = message.get("kv") if isinstance(message, dict) else None
    if not isinstance(frame, KVFrame) or not getattr(frame.data, "nbytes", 0):
        raise KVUnavailable("a message that holds no KV")
    return frame


def _bytes_of(message: object) -> np.ndarray:
    try:
        return np.frombuffer(_frame_of(message).data, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise KVUnavailable("a piece of KV that is not plain bytes") from error


class KVServer:
    """The holder's side: a worker handler that answers pulls.

    Parameters
    ----------
    address
        Of this worker, as in the handles it gave out.
    export
        Gives the pinned bytes of a handle, or raises ``KVUnavailable``.
    release
        Frees them; called when a puller has them all.
    stall_timeout_s
        A puller that takes nothing for so long is dropped.
    export_part
        Gives the bytes of some layers and heads, and their digest, or raises ``KVUnavailable``.
    """

    def __init__(
        self,
        address: str,
        export: Export,
        release: Release,
        stall_timeout_s: float,
        export_part: ExportPart | None = None,
    ) -> None:
        self._address = address
        self._export_part = export_part
        self._export = export
        self._release = release
        self._stall_s = stall_timeout_s

    async def handle(self, comm: Comm, ask: object = None) -> Status:
        """Answer one pull on its connection."""
        try:
            asked = unpack_ask(ask, self._address)
            views, digest = await self._views(asked)
            held = _num_bytes(views)
            if held != asked.num_bytes:
                raise KVUnavailable(f"{asked.num_bytes} bytes asked of {held}")
        except KVUnavailable as refusal:
            await comm.write(pack_answer(Answer(reason=str(refusal))), serializers=_PLAIN)
            return Status.dont_reply
        try:
            device = _device_frames(comm, views) if asked.to_device else None
            answer = Answer(held, _byte_stream(comm) is not None, digest, device is not None)
            await self._send(comm, views, answer, device)
        except OSError as error:
            comm.abort()
            raise CommClosedError(f"a KV pull broke off: {error!r}") from error
        finally:
            _end(views)
        if asked.shard is None:
            self._release(asked.handle.request_id, asked.handle.secret)
        return Status.dont_reply

    async def _views(self, asked: Ask) -> tuple[Views, int]:
        if asked.shard is None:
            return self._export(asked.handle), asked.handle.digest
        if self._export_part is None:
            raise KVUnavailable(f"{self._address} does not give parts of its KV")
        return await self._export_part(asked.handle, asked.shard)

    async def _send(
        self, comm: Comm, views: Views, answer: Answer, device: DeviceFrames | None
    ) -> None:
        stream = _byte_stream(comm)
        await _soon(comm.write(pack_answer(answer), serializers=_PLAIN), self._stall_s)
        if stream is not None:
            for piece in _pieces(views):
                await _soon(stream.write(piece), self._stall_s)
        else:
            for frame in device.frames() if device else _host_frames(views):
                message = {"kv": to_serialize(frame)}
                await _soon(comm.write(message, serializers=SERIALIZERS), self._stall_s)
        if await _soon(comm.read(deserializers=_PLAIN), self._stall_s) != DONE:
            raise CommClosedError("the puller did not confirm")


def _byte_stream(comm: Comm) -> IOStream | None:
    """The socket below a TCP or TLS connection, to read into memory that exists already."""
    stream = getattr(comm, "stream", None)
    return stream if isinstance(stream, IOStream) else None


def _num_bytes(views: Views) -> int:
    return views.num_bytes if isinstance(views, KVStream) else sum(view.nbytes for view in views)


def _pieces(views: Views) -> Iterator[memoryview]:
    for view in views.chunks if isinstance(views, KVStream) else views:
        for start in range(0, view.nbytes, _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]


def _host_frames(views: Views) -> Iterator[KVFrame]:
    """In-process a message is read after the next is written; chunks of a stream share memory."""
    for piece in _pieces(views):
        yield KVFrame(memoryview(bytes(piece)) if isinstance(views, KVStream) else piece)


def _device_frames(comm: Comm, views: Views) -> DeviceFrames | None:
    """The way between devices, if this side and the connection have one."""
    if isinstance(views, KVStream) and carries_device_memory(comm):
        return views.device
    return None


def _end(views: Views) -> None:
    """No chunk is used any more: what copies them stops, and has stopped when this returns."""
    if isinstance(views, KVStream):
        views.chunks.close()


async def _soon(awaitable: Awaitable[T], timeout_s: float) -> T:
    async with asyncio.timeout(timeout_s):
        return await awaitable
