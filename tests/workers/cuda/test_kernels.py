"""The Triton kernels against plain torch, on the CPU through Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from daskserve.workers.cuda import reference
from daskserve.workers.cuda.attention import VarlenAttention
from daskserve.workers.cuda.self_check import (
    CASES,
    DECODE,
    MIXED,
    PROMPTS,
    QUICK,
    Case,
    agrees,
    can_be_trusted,
    largest_error,
    largest_packed_error,
)

HAS_TRITON = importlib.util.find_spec("triton") is not None
CPU = torch.device("cpu")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("options", "cases"), [(["--quick"], QUICK), pytest.param([], CASES, marks=pytest.mark.slow)]
)
def test_the_triton_kernels_compute_what_plain_torch_does(options, cases):
    # In a process of its own: Triton decides when it is imported whether to interpret.
    told = subprocess.run(
        [sys.executable, "-m", "daskserve.workers.cuda.self_check", *options],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert told.returncode == 0, told.stderr
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(lines) == len(cases)
    assert {line["dtype"] for line in lines} == {"float32", "bfloat16", "float16"}
    assert not [line for line in lines if not line["is_right"]]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("num_tiles", "kv_heads", "max_context", "splits"),
    [(1, 8, 8192, 32), (64, 8, 8192, 1), (8, 8, 8192, 4), (1, 8, 200, 1), (1, 1, 1024, 8)],
)
def test_contexts_are_split_when_rows_are_few(num_tiles, kv_heads, max_context, splits):
    from daskserve.workers.cuda.triton_attention import splits_for

    assert splits_for(num_tiles, kv_heads, max_context, num_processors=132) == splits


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.softcap is None and not case.has_sinks], ids=str
)
def test_varlen_attention_is_called_with_the_right_pages_and_lengths(case):
    assert agrees(VarlenAttention(reference.varlen_attn), case, CPU)


def test_an_older_varlen_attention_is_known_by_its_arguments():
    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        raise AssertionError

    def scaled(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size):
        return reference.varlen_attn(
            query, key, value, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size
        )

    assert not VarlenAttention(older).is_usable
    found = VarlenAttention(scaled)
    assert found.is_usable and not found.takes_pages


def test_a_wrong_kernel_is_found_out():
    class OffByOne(VarlenAttention):
        def __call__(self, query, keys, values, step, asked):
            step.context_tokens = step.context_tokens - 1
            return super().__call__(query, keys, values, step, asked)

    op = OffByOne(reference.varlen_attn)
    assert largest_error(op, Case(DECODE), CPU) > 0.01
    assert not agrees(op, Case(DECODE, dtype="bfloat16"), CPU)
    assert agrees(VarlenAttention(reference.varlen_attn), Case(MIXED, dtype="bfloat16"), CPU)


def test_the_check_before_use_takes_packed_prompts_and_pages():
    op = VarlenAttention(reference.varlen_attn)
    for dtype in (torch.float32, torch.bfloat16):
        assert can_be_trusted(op, dtype, CPU, in_pages=True)

    def without_scale(*args, scale, **options):
        return reference.varlen_attn(*args, scale=1.0, **options)

    wrong = VarlenAttention(reference.varlen_attn)
    wrong._function = without_scale
    assert not can_be_trusted(wrong, torch.float32, CPU, in_pages=False)
    # By the scale, not by rounding of the large values in the page that is nobody's.
    assert largest_packed_error(wrong, Case(PROMPTS, page_size=256), CPU) > 0.1
