"""Frames of KV in Dask messages: bytes as they are, device memory as it is, nothing pickled."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from distributed.protocol import to_serialize
from distributed.protocol.core import dumps, loads

from daskserve.core.kv import KVFrame
from daskserve.service.kv_frames import SERIALIZERS


class OnDevice:
    """What UCXX takes for device memory, without any."""

    __cuda_array_interface__ = {"shape": (5,), "typestr": "|u1", "data": (0, False), "version": 3}
    nbytes = 5


def test_bytes_travel_as_they_are():
    data = np.arange(100, dtype=np.uint8)
    frames = dumps({"kv": to_serialize(KVFrame(memoryview(data)))}, serializers=SERIALIZERS)
    assert not any(b"numpy" in bytes(frame) for frame in frames[:-1])
    message = loads(frames, deserializers=SERIALIZERS)
    assert bytes(message["kv"].data) == data.tobytes()


def test_device_memory_is_neither_copied_nor_compressed():
    memory = OnDevice()
    frames = dumps({"kv": to_serialize(KVFrame(memory))}, serializers=SERIALIZERS)
    assert frames[-1] is memory
    assert loads(frames, deserializers=SERIALIZERS)["kv"].data is memory


def test_nothing_is_unpickled():
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    with pytest.raises(TypeError):
        frames = dumps(
            {"kv": to_serialize(pickle.dumps)}, serializers=SERIALIZERS, on_error="raise"
        )
    frames = dumps({"kv": to_serialize(Bomb())}, serializers=["pickle"])
    with pytest.raises(TypeError):
        loads(frames, deserializers=SERIALIZERS)
