"""The matrix product equals numpy's, for every kind that this CPU can run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daskserve.workers.kernels.cpu import HAS_AVX512_BF16, has_amx
from daskserve.workers.kernels.jit import kernel
from daskserve.workers.kernels.matmul import (
    FEW_LANES,
    ROWS,
    close_tiles,
    compile_product,
    multiply,
    open_tiles,
    tile_config,
)
from daskserve.workers.kernels.vector import LANES

KINDS = ["float32", "bfloat16"] + ["pairs"] * HAS_AVX512_BF16 + ["tiles"] * has_amx()


@kernel
def _run(product, tiles, num_blocks, weights, row_bytes, source, stride, steps, out, ahead):
    open_tiles(product, tiles)
    second = weights + LANES * row_bytes
    multiply(
        *(product, num_blocks, weights, second, row_bytes),
        *(source, stride, steps, out, ahead),
    )
    close_tiles(product)


def packed(inputs: torch.Tensor) -> torch.Tensor:
    """``[tokens, k]`` as blocks of 16 lanes; bfloat16 features in pairs."""
    blocks = inputs.unflatten(0, (-1, LANES))
    if inputs.dtype == torch.float32:
        return blocks.transpose(1, 2).contiguous()
    return blocks.unflatten(2, (-1, 2)).transpose(1, 2).contiguous()


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=25)
@given(
    num_blocks=st.integers(1, 2),
    steps=st.integers(1, 9),
    seed=st.integers(0, 2**32),
    ahead=st.sampled_from([0, 64]),
)
def test_equals_numpy(kind: str, num_blocks: int, steps: int, seed: int, ahead: int) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    k = steps * 64 // dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(ROWS, k, generator=generator).to(dtype)
    inputs = torch.randn(num_blocks * LANES, k, generator=generator).to(dtype)
    source, out, tiles = packed(inputs), np.zeros((num_blocks, ROWS, LANES), "f4"), tile_config()
    _run(
        *(compile_product(kind), tiles.ctypes.data, num_blocks),
        *(weights.data_ptr(), k * dtype.itemsize, source.data_ptr()),
        *(k * dtype.itemsize * LANES, steps, out.ctypes.data, ahead),
    )
    expected = inputs.double().numpy() @ weights.double().numpy().T
    got = out.transpose(0, 2, 1).reshape(expected.shape)
    assert np.abs(got - expected).max() < 1e-5 * k


@pytest.mark.parametrize("kind", KINDS)
def test_of_few_tokens_every_sum_is_the_same_to_the_bit(kind: str) -> None:
    """A request's tokens may not depend on how many others decode beside it."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    k = 9 * 64 // dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(ROWS, k, generator=generator).to(dtype)
    source, tiles = packed(torch.randn(LANES, k, generator=generator).to(dtype)), tile_config()
    sides = []
    for of_few in (False, True):
        out = np.full((ROWS, LANES), np.nan, "f4")
        _run(
            *(compile_product(kind, of_few), tiles.ctypes.data, 1),
            *(weights.data_ptr(), k * dtype.itemsize, source.data_ptr()),
            *(k * dtype.itemsize * LANES, 9, out.ctypes.data, 0),
        )
        sides.append(out)
    all_lanes, few = sides
    assert (few[:, :FEW_LANES] == all_lanes[:, :FEW_LANES]).all()
    assert np.isfinite(few).all()
