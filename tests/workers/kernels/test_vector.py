"""Vector functions against numpy and torch."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daskserve.workers.kernels.jit import kernel
from daskserve.workers.kernels.packing import (
    pack_pair,
    pack_scalars,
    store_transposed,
    transpose_four,
)
from daskserve.workers.kernels.vector import (
    exp2,
    highest_lane,
    keep_between,
    load,
    load_scalar,
    reciprocal,
    store,
    store_scalar,
    store_word,
    store_words,
    sum_lanes,
)


@kernel
def _functions(source, target):
    value = load(source)
    store(target, exp2(value))
    store(target + 64, reciprocal(value))
    store(target + 128, keep_between(5, 7, 12, value))
    store_scalar(target + 192, highest_lane(value))
    store_scalar(target + 196, sum_lanes(value))


@kernel
def _pack(low, high, target):
    store_words(target, pack_pair(load(low), load(high)))
    store_word(target + 64, pack_scalars(load_scalar(low), load_scalar(high)))


@kernel
def _transpose(source, four, all_lanes, row_bytes, num_rows):
    transpose_four(source, four, row_bytes)
    store_transposed(source, all_lanes, row_bytes, num_rows)


# Without subnormal numbers: the CPU's own rounding to bfloat16 takes them for 0.
numbers = st.lists(
    st.floats(-99, 99, width=32, allow_subnormal=False), min_size=16, max_size=16
).map(lambda values: np.array(values, dtype="f4"))


@settings(deadline=None)
@given(numbers)
def test_arithmetic(values: np.ndarray) -> None:
    out = np.zeros(64, dtype="f4")
    values[np.abs(values) < 1e-3] = 1
    _functions(values.ctypes.data, out.ctypes.data)
    np.testing.assert_allclose(out[:16], np.exp2(values.astype("f8")), rtol=2e-7)
    np.testing.assert_allclose(out[16:32], 1 / values.astype("f8"), rtol=2e-7)
    np.testing.assert_array_equal(out[34:39], values[2:7])  # lane 2 stands at 5 + 2
    assert np.isneginf(np.delete(out[32:48], range(2, 7))).all()
    assert out[48] == values.max()
    np.testing.assert_allclose(out[49], values.astype("f8").sum(), atol=1e-3)


def test_what_is_far_below_weighs_nothing() -> None:
    out, values = np.zeros(64, dtype="f4"), np.full(16, -np.inf, dtype="f4")
    _functions(values.ctypes.data, out.ctypes.data)
    assert (out[:16] < 1e-29).all()


@settings(deadline=None)
@given(numbers, numbers)
def test_bfloat16_pairs_round_as_torch_does(low: np.ndarray, high: np.ndarray) -> None:
    out = np.zeros(34, dtype="i2")
    _pack(low.ctypes.data, high.ctypes.data, out.ctypes.data)
    pairs = torch.from_numpy(np.stack([low, high], axis=1)).bfloat16()
    got = torch.from_numpy(out).view(torch.bfloat16)
    assert torch.equal(got[:32], pairs.flatten())
    assert torch.equal(got[32:], pairs[0])


def test_transposed_stores_write_the_asked_rows_only() -> None:
    source = np.random.default_rng(0).standard_normal((16, 16)).astype("f4")
    four, rows = np.zeros((4, 20), dtype="f4"), np.zeros((16, 20), dtype="f4")
    _transpose(source.ctypes.data, four.ctypes.data, rows.ctypes.data, 80, 11)
    np.testing.assert_array_equal(four[:, :16], source.T[:4])
    np.testing.assert_array_equal(rows[:11, :16], source.T[:11])
    assert not four[:, 16:].any()
    assert not rows[11:].any()
