"""How frames of KV travel in Dask messages: the bytes as they are, and nothing unpickled.

Dask's own families pickle the type of what they send. This one knows a single type. Frames in
device memory go through ``cuda_serialize`` and stay on the device, which UCXX can send and receive.
"""

from __future__ import annotations

from typing import Any

from distributed.comm import Comm
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import register_serialization_family

from daskserve.core.kv import KVFrame

FAMILY = "daskserve-kv"
SERIALIZERS = [FAMILY, "msgpack"]

_DEVICE_PROTOCOLS = ("ucx://", "ucxx://")


def carries_device_memory(comm: Comm) -> bool:
    """Whether frames may stay on devices on their way over this connection."""
    return comm.peer_address.startswith(_DEVICE_PROTOCOLS)


@cuda_serialize.register(KVFrame)
def _to_device_frames(frame: KVFrame) -> tuple[dict[str, Any], list[Any]]:
    return {}, [frame.data]


@cuda_deserialize.register(KVFrame)
def _from_device_frames(header: dict[str, Any], frames: list[Any]) -> KVFrame:
    return KVFrame(frames[0])


def _dump(frame: object) -> tuple[dict[str, Any], list[Any]]:
    if not isinstance(frame, KVFrame):
        raise NotImplementedError(f"{type(frame).__name__} is no frame of KV")
    if hasattr(frame.data, "__cuda_array_interface__"):
        header, frames = cuda_serialize(frame)
    else:
        header, frames = {}, [frame.data]
    # Compressing KV costs more than it saves, and device memory cannot be.
    return header | {"compression": (False,)}, frames


def _load(header: dict[str, Any], frames: list[Any]) -> KVFrame:
    (data,) = frames
    if hasattr(data, "__cuda_array_interface__"):
        return cuda_deserialize.dispatch(KVFrame)(header, [data])
    return KVFrame(data)


register_serialization_family(FAMILY, _dump, _load)
