"""The bytes of a KV pull: a fixed header asks, a fixed header answers, then raw KV follows.

Nothing here is unpickled or evaluated; every length is bounded before it is used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from daskserve.core.kv import KVHandle
from daskserve.core.shards import Shard
from daskserve.errors import KVUnavailable

_MAGIC = b"DSKV"
_VERSION = 3
_MAX_ID_BYTES = 256
_MAX_SECRET_BYTES = 64
_MAX_LAYOUT_BYTES = 64
_MAX_REASON_BYTES = 500
_MAX_KV_BYTES = 2**40

# magic, version, bytes of id / secret / layout, tokens, digest, KV bytes; first layer, layers,
# first head, heads of a part, all 0 for the whole; whether frames may stay on a device
_ASK = struct.Struct("<4sBHBBQQQ4H?")
# magic, version, status, KV bytes, their digest, bytes of the reason
_ANSWER = struct.Struct("<4sBBQQH")

_REFUSED, _RAW, _MESSAGES, _DEVICE = range(4)

DONE = b"DSKV-done"
"""The puller has every byte: the holder may free the pages."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A handle shown by a puller, and how many bytes its pages take.

    ``shard`` are the layers and heads that it wants; None: all, which one rank holds.
    ``to_device`` says that it can take frames of device memory.
    """

    handle: KVHandle
    num_bytes: int
    shard: Shard | None = None
    to_device: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """``reason`` of a refusal, or how the bytes come: raw on the stream, or in messages, which
    ``is_device`` says hold device memory.

    ``digest`` is what was computed when the prompt was.
    """

    num_bytes: int = 0
    is_raw: bool = False
    digest: int = 0
    is_device: bool = False
    reason: str | None = None


def pack_ask(
    handle: KVHandle, num_bytes: int, shard: Shard | None = None, to_device: bool = False
) -> bytes:
    """The header that asks for the KV of ``handle``, or for some layers and heads of it."""
    part = (0, 0, 0, 0)
    if shard is not None:
        part = (shard.first_layer, shard.num_layers, shard.first_head, shard.num_heads)
    request_id = handle.request_id.encode()
    layout = handle.kv_layout.encode()
    header = _ASK.pack(
        _MAGIC,
        _VERSION,
        len(request_id),
        len(handle.secret),
        len(layout),
        handle.num_tokens,
        handle.digest,
        num_bytes,
        *part,
        to_device,
    )
    return header + request_id + handle.secret + layout


def unpack_ask(data: object, address: str) -> Ask:
    """Read a header that came from outside.

    Parameters
    ----------
    data
        Whatever the peer sent.
    address
        Of this instance; it completes the handle.

    Raises
    ------
    KVUnavailable
        Not such a header, or a length beyond its limit.
    """
    if not isinstance(data, bytes) or len(data) < _ASK.size:
        raise KVUnavailable("not a KV request")
    magic, version, id_size, secret_size, layout_size, num_tokens, digest, num_bytes, *rest = (
        _ASK.unpack_from(data)
    )
    if magic != _MAGIC or version != _VERSION:
        raise KVUnavailable("not a KV request of this version")
    if len(data) != _ASK.size + id_size + secret_size + layout_size:
        raise KVUnavailable("a KV request of the wrong length")
    if not (
        0 < id_size <= _MAX_ID_BYTES
        and 0 < secret_size <= _MAX_SECRET_BYTES
        and 0 < layout_size <= _MAX_LAYOUT_BYTES
        and 0 < num_bytes <= _MAX_KV_BYTES
    ):
        raise KVUnavailable("a KV request with a length beyond its limit")
    *part, to_device = rest
    if any(part) and not (part[1] and part[3]):
        raise KVUnavailable("a KV request for no layers or no heads")
    start = _ASK.size
    request_id = data[start : start + id_size]
    secret = data[start + id_size : start + id_size + secret_size]
    layout = data[start + id_size + secret_size :]
    try:
        handle = KVHandle(
            request_id=request_id.decode(),
            instance_address=address,
            secret=secret,
            num_tokens=num_tokens,
            kv_layout=layout.decode(),
            digest=digest,
        )
    except UnicodeDecodeError:
        raise KVUnavailable("a KV request with a malformed name") from None
    return Ask(handle, num_bytes, Shard(*part) if any(part) else None, to_device)


def pack_answer(answer: Answer) -> bytes:
    """The header that precedes the bytes, or the refusal."""
    reason = (answer.reason or "").encode()[:_MAX_REASON_BYTES]
    status = _RAW if answer.is_raw else _DEVICE if answer.is_device else _MESSAGES
    if answer.reason is not None:
        status = _REFUSED
    header = (_MAGIC, _VERSION, status, answer.num_bytes, answer.digest, len(reason))
    return _ANSWER.pack(*header) + reason


def unpack_answer(data: object) -> Answer:
    """Read an answer; KVUnavailable when it is none."""
    if not isinstance(data, bytes) or len(data) < _ANSWER.size:
        raise KVUnavailable("the peer does not serve KV")
    magic, version, status, num_bytes, digest, reason_size = _ANSWER.unpack_from(data)
    well_formed = (
        magic == _MAGIC
        and version == _VERSION
        and status in (_REFUSED, _RAW, _MESSAGES, _DEVICE)
        and reason_size <= _MAX_REASON_BYTES
        and len(data) == _ANSWER.size + reason_size
    )
    if not well_formed:
        raise KVUnavailable("a malformed answer to a KV request")
    if status == _REFUSED:
        return Answer(reason=data[_ANSWER.size :].decode(errors="replace"))
    return Answer(num_bytes, status == _RAW, digest, status == _DEVICE)
