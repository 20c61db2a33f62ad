"""Compares attention kernels with plain torch on small random steps.

An engine asks before it trusts PyTorch's attention on a card. As a program it checks the Triton
kernels on a GPU, or on the CPU through Triton's interpreter:
``TRITON_INTERPRET=1 python -m daskserve.workers.cuda.self_check`` prints one JSON line per case.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from daskserve.workers.cuda import reference
from daskserve.workers.cuda.attention import Attention, PagedOp, PlainAttention
from daskserve.workers.cuda.step import Asked, DeviceStep, to_device
from daskserve.workers.forward import ForwardBatch

# Largest difference from float32 arithmetic on the same inputs, of values around 1.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.004}

PROMPTS, CHUNKS, DECODE, MIXED = "prompts", "chunks", "decode", "mixed"
_ROWS = {  # new tokens and context of each row
    PROMPTS: ((5, 5), (33, 33), (1, 1)),
    CHUNKS: ((7, 90), (25, 26)),
    DECODE: ((1, 1), (1, 17), (1, 256), (1, 400)),
    MIXED: ((1, 40), (1, 3), (21, 21), (9, 70)),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One step: what kind, and the sizes of the model."""

    rows: str = MIXED
    dtype: str = "float32"
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


QUICK = (
    Case(MIXED, dtype="bfloat16", heads=8, head_dim=128),
    Case(PROMPTS, dtype="float16", heads=2, kv_heads=2),
    Case(DECODE, heads=3, kv_heads=1, head_dim=80, page_size=256),
    Case(CHUNKS, window=24, softcap=5.0, has_sinks=True),
)
CASES = (
    *QUICK,
    *(Case(rows) for rows in _ROWS),
    Case(CHUNKS, head_dim=96, page_size=8),
    Case(DECODE, window=100, softcap=20.0),
    Case(MIXED, softcap=5.0, has_sinks=True),
    Case(DECODE, has_sinks=True),
)


def largest_error(op: PagedOp, case: Case, device: torch.device) -> float:
    """Largest difference of an output value of ``op`` from plain torch."""
    step, query, keys, values, asked = _random_step(op, case, device)
    exact = PlainAttention()(query.float(), keys.float(), values.float(), step, asked)
    return float((op(query, keys, values, step, asked).float() - exact).abs().max())


def largest_packed_error(op: PagedOp, case: Case, device: torch.device) -> float:
    """The same for whole prompts whose keys and values are not in pages."""
    step, query, keys, values, asked = _random_step(op, case, device)
    # Behind page 0, whose keys are all the same: with those any scale would do.
    here = slice(case.page_size, case.page_size + len(query))
    key, value = (pages.flatten(0, 1)[here].contiguous() for pages in (keys, values))
    start, longest = step.query_start, step.max_query
    exact = reference.varlen_attn(
        query.float(),
        key.float(),
        value.float(),
        start,
        start,
        longest,
        longest,
        scale=asked.scaling,
        window_size=(-1, 0),
        enable_gqa=True,
    )
    return float((op(query, key, value, step, asked).float() - exact).abs().max())


def agrees(op: PagedOp, case: Case, device: torch.device) -> bool:
    """Whether the error is within what rounding explains."""
    return largest_error(op, case, device) <= TOLERANCE[case.torch_dtype]


def can_be_trusted(op: PagedOp, dtype: torch.dtype, device: torch.device, in_pages: bool) -> bool:
    """Whether PyTorch's attention, as it is installed here, computes prompts, and pages of 256."""
    case = Case(PROMPTS, dtype=str(dtype).removeprefix("torch."), page_size=256)
    error = largest_packed_error(op, case, device)
    if in_pages:
        error = max([error, *(largest_error(op, replace(case, rows=r), device) for r in _ROWS)])
    return error <= TOLERANCE[dtype]


def _random_step(
    op: PagedOp, case: Case, device: torch.device
) -> tuple[DeviceStep, torch.Tensor, torch.Tensor, torch.Tensor, Asked]:
    rng = np.random.default_rng(7)
    new, contexts = np.array(_ROWS[case.rows]).T
    counts = -(-contexts // case.page_size)
    table = np.zeros((len(new), counts.max()), np.int32)
    ids = 1 + rng.permutation(counts.sum())
    for row, count in enumerate(counts):
        table[row, :count], ids = ids[:count], ids[count:]
    batch = ForwardBatch(
        token_ids=np.zeros(new.sum(), np.int64),
        positions=np.concatenate([np.arange(c - n, c) for n, c in zip(new, contexts, strict=True)]),
        query_start=np.cumsum([0, *new]).astype(np.int32),
        context_tokens=contexts.astype(np.int32),
        page_table=table,
    )

    def random(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape, np.float32)).to(device, case.torch_dtype)

    # Page 0 is nobody's: whoever reads it is found out.
    pages = random(int(counts.sum()) + 1, 1, 2, case.kv_heads, case.page_size, case.head_dim)
    pages[0] = 1e4
    attention = Attention(op, None, case.heads // case.kv_heads)
    step = to_device(batch, pages, attention, device)
    keys, values = (pages[:, 0, part].transpose(1, 2) for part in (0, 1))
    sinks = random(case.heads) if case.has_sinks else None
    asked = Asked(case.head_dim**-0.5, case.window, case.softcap, sinks)
    return step, random(int(new.sum()), case.heads, case.head_dim), keys, values, asked


def triton_errors(
    cases: Sequence[Case], device: torch.device, num_processors: int
) -> Iterator[tuple[Case, float]]:
    """The cases on the Triton kernels."""
    from daskserve.workers.cuda.triton_attention import TritonAttention

    op = TritonAttention(num_processors)
    for case in cases:
        yield case, largest_error(op, case, device)


def main() -> None:
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    device = torch.device("cpu" if is_interpreted else "cuda")
    cases = QUICK if "--quick" in sys.argv[1:] else CASES
    for case, error in triton_errors(cases, device, num_processors=32):
        is_right = error <= TOLERANCE[case.torch_dtype]
        print(json.dumps(asdict(case) | {"error": error, "is_right": is_right}), flush=True)


if __name__ == "__main__":
    main()
