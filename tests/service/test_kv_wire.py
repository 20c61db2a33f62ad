"""Headers of KV pulls: what is packed is read back, whatever else is refused."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.core.kv import KVHandle
from daskserve.core.shards import Shard
from daskserve.errors import KVUnavailable
from daskserve.service.kv_wire import Answer, Ask, pack_answer, pack_ask, unpack_answer, unpack_ask

HANDLE = KVHandle("7-ab", "tcp://127.0.0.1:1", b"s" * 16, 100, "layout", digest=2**64 - 1)

handles = st.builds(
    KVHandle,
    request_id=st.text(st.characters(codec="utf-8"), min_size=1, max_size=60),
    instance_address=st.just("here"),
    secret=st.binary(min_size=1, max_size=64),
    num_tokens=st.integers(0, 2**64 - 1),
    kv_layout=st.text(st.sampled_from("0123456789abcdef"), min_size=1, max_size=64),
    digest=st.integers(0, 2**64 - 1),
)


counts = st.integers(1, 2**16 - 1)
shards = st.none() | st.builds(Shard, counts, counts, counts, counts)


@given(handles, st.integers(1, 2**40), shards)
def test_an_ask_is_read_back(handle: KVHandle, num_bytes: int, shard: Shard | None):
    assert unpack_ask(pack_ask(handle, num_bytes, shard), "here") == Ask(handle, num_bytes, shard)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(10, True),
        Answer(10, True, 2**64 - 1),
        Answer(2**40, False),
        Answer(reason="no such KV"),
        Answer(reason=""),
    ],
)
def test_an_answer_is_read_back(answer: Answer):
    assert unpack_answer(pack_answer(answer)) == answer


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes):
    with pytest.raises(KVUnavailable):
        unpack_ask(data, "here")
    with pytest.raises(KVUnavailable):
        unpack_answer(data)


@given(st.data())
def test_a_damaged_ask_is_refused_or_still_well_formed(data: st.DataObject):
    good = pack_ask(HANDLE, 4096)
    at = data.draw(st.integers(0, len(good) - 1))
    damaged = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    try:
        ask = unpack_ask(damaged, HANDLE.instance_address)
    except KVUnavailable:
        return
    assert ask != Ask(HANDLE, 4096)


@pytest.mark.parametrize("num_bytes", [0, 2**40 + 1, 2**63])
def test_a_length_beyond_its_limit_is_refused(num_bytes: int):
    with pytest.raises(KVUnavailable, match="limit"):
        unpack_ask(pack_ask(HANDLE, num_bytes), "here")


@pytest.mark.parametrize("ask", [None, 7, "text", [], {}, b"", b"DSKV"])
def test_other_types_are_refused(ask: object):
    with pytest.raises(KVUnavailable):
        unpack_ask(ask, "here")


def test_a_pickle_is_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "created"), "w"))

    bomb = pickle.dumps(Bomb())
    for unpack in (lambda: unpack_ask(bomb, "here"), lambda: unpack_answer(bomb)):
        with pytest.raises(KVUnavailable):
            unpack()
    assert not list(tmp_path.iterdir())
