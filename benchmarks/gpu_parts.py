"""The parts of benchmarks/gpu.py that need a GPU; each runs in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from daskserve.core.instance import EngineConfig, Role
from daskserve.core.params import SamplingParams
from daskserve.core.request import Completion, Request
from daskserve.models.catalog import resolve
from daskserve.text.tokenizer import Tokenizer
from daskserve.workers.forward import ForwardBatch, ModelShape
from daskserve.workers.kv_digest import slice_digests
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.loading import build_engine
from daskserve.workers.sequence import Sequence

BLOCK = 16


@dataclass
class Rates:
    """What this card was measured to do."""

    bytes_per_s: float = 0.0
    flops: float = 0.0


Figure = dict[str, Any]


def figure(name: str, value: float, unit: str, target: float | None = None) -> Figure:
    """A line of the result; larger is better, and None is no target."""
    is_ok = target is None or value >= target
    return {"name": name, "value": value, "unit": unit, "target": target, "ok": bool(is_ok)}


def seconds(run: Callable[[], object], rounds: int = 10) -> float:
    """Median time on the device of one call."""
    for _ in range(2):
        run()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def machine(rates: Rates) -> list[Figure]:
    """Bandwidth of a copy, and the rate of a large bfloat16 product on random data."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    rates.bytes_per_s = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rates.flops = 2 * 8192**3 / seconds(lambda: a @ b)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    return [
        figure("memory bandwidth, read and written", rates.bytes_per_s / 1e12, "TB/s"),
        figure("bfloat16 matrix product", rates.flops / 1e12, "TFLOP/s"),
    ]


def kernels(rates: Rates) -> list[Figure]:
    """Every attention case against plain torch, then the time of decode attention over its KV."""
    from daskserve.workers.cuda import self_check
    from daskserve.workers.cuda.attention import own_varlen
    from daskserve.workers.cuda.triton_attention import TritonAttention

    device = torch.device("cuda", 0)
    num_processors = torch.cuda.get_device_properties(0).multi_processor_count
    num_right = 0
    for case, error in self_check.triton_errors(self_check.CASES, device, num_processors):
        is_right = error <= self_check.TOLERANCE[case.torch_dtype]
        num_right += is_right
        print(f"triton {'ok   ' if is_right else 'WRONG'} {error:.2g} {case}", flush=True)
    share = num_right / len(self_check.CASES)
    figures = [figure("Triton attention cases that agree with plain torch", share, "share", 1.0)]
    varlen = own_varlen()
    if varlen is not None:
        is_right = self_check.can_be_trusted(varlen, torch.bfloat16, device, varlen.takes_pages)
        name = "varlen_attn, with pages" if varlen.takes_pages else "varlen_attn, packed prompts"
        figures.append(figure(f"{name}, agrees with plain torch", float(is_right), "yes/no", 1.0))
    op = TritonAttention(num_processors)
    for rows, context in ((1, 8192), (8, 4096), (64, 2048)):
        taken_s, kv_bytes = _decode_attention(op, rows, context)
        name = f"Triton decode attention, {rows} x {context} tokens"
        share = kv_bytes / taken_s / rates.bytes_per_s
        print(f"{name}: {taken_s * 1e6:.0f} us, {kv_bytes / taken_s / 1e12:.2f} TB/s")
        figures.append(figure(name, share, "of bandwidth", 0.5 if rows > 1 else None))
    return figures


def _decode_attention(op: Any, rows: int, context: int) -> tuple[float, int]:
    from daskserve.workers.cuda.attention import Attention
    from daskserve.workers.cuda.step import Asked, to_device

    device = torch.device("cuda", 0)
    batch = decode_batch(rows, context)
    num_pages = int(batch.page_table.max()) + 1
    pages = torch.randn(num_pages, 1, 2, 8, BLOCK, 128, device=device, dtype=torch.bfloat16)
    step = to_device(batch, pages, Attention(op, None, 4), device)
    query = torch.randn(rows, 32, 128, device=device, dtype=torch.bfloat16)
    keys, values = (pages[:, 0, part].transpose(1, 2) for part in (0, 1))
    asked = Asked(128**-0.5)
    taken_s = seconds(lambda: op(query, keys, values, step, asked), rounds=30)
    return taken_s, rows * context * 2 * 8 * 128 * 2


def decode_batch(rows: int, context: int, seed: int = 0) -> ForwardBatch:
    """Rows of one new token each, their pages in random order."""
    rng = np.random.default_rng(seed)
    width = -(-context // BLOCK)
    table = 1 + rng.permutation(rows * width).astype(np.int32).reshape(rows, width)
    return ForwardBatch(
        token_ids=rng.integers(3, 1000, rows),
        positions=np.full(rows, context - 1),
        query_start=np.arange(rows + 1, dtype=np.int32),
        context_tokens=np.full(rows, context, np.int32),
        page_table=table,
    )


def prompt_batch(rows: int, length: int) -> ForwardBatch:
    """Whole prompts."""
    width = -(-length // BLOCK)
    return ForwardBatch(
        token_ids=np.random.default_rng(0).integers(3, 1000, rows * length),
        positions=np.tile(np.arange(length), rows),
        query_start=np.arange(rows + 1, dtype=np.int32) * np.int32(length),
        context_tokens=np.full(rows, length, np.int32),
        page_table=1 + np.arange(rows * width, dtype=np.int32).reshape(rows, width),
    )


def copies(rates: Rates, device: str = "cuda") -> list[Figure]:
    """Digests equal those of the CPU; KV out and in through pinned memory."""
    from daskserve.workers.cuda.pool import DevicePool

    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    figures = []
    shape = ModelShape(16, 8, 64, 32000, 8192, frozenset())
    host = KVPool(shape, torch.bfloat16, 128, BLOCK)
    host.pages.normal_()
    pool, other = (DevicePool(shape, torch.bfloat16, 128, BLOCK, where) for _ in range(2))
    pool.pages.copy_(host.pages)
    pages = list(range(1, 65)) + list(range(128, 64, -1))
    is_same = np.array_equal(slice_digests(pool, pages), slice_digests(host, pages))
    figures.append(figure("digests computed on the device are right", float(is_same), "yes/no", 1))
    for _ in range(2):  # the first round pins memory
        started_at = time.perf_counter()
        room = other.incoming(pages).chunks
        for sent, place in zip(pool.outgoing(pages).chunks, room, strict=True):
            place[:] = sent
        list(room)
        rate = 2 * len(pages) * pool.page_bytes / (time.perf_counter() - started_at)
    is_same = torch.equal(pool.pages[pages], other.pages[pages])
    figures.append(figure("KV copied out and in arrives", float(is_same), "yes/no", 1))
    figures.append(figure("KV out and in through the host", rate / 1e9, "GB/s"))
    return figures


def exact(rates: Rates, device: str = "cuda", load: Any = None) -> list[Figure]:
    """Greedy tokens in float32 equal to transformers' generate."""
    from transformers import AutoModelForCausalLM

    name = "tiny-random-llama"
    config = EngineConfig(name, "float32", device, num_kv_blocks=256, block_size=BLOCK)
    folder = resolve(name)
    options = {} if load is None else {"load": lambda c: (load(folder, c), Tokenizer.load(folder))}
    served = build_engine(Role.COLOCATED, replace(config, chunk_tokens=64), **options)
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(4, 300, n).tolist()) for n in (1, 16, 40, 100, 250)]
    sequences = [
        Sequence(Request(f"r{i}", prompt, SamplingParams(max_tokens=20), 0.0, 0))
        for i, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        served.add(sequence)
    while (step := served.schedule()) is not None:
        served.execute(step)
    found = {
        s.request.request_id: e.token_ids for s, e in served.events if isinstance(e, Completion)
    }
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    num_equal = 0
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=device)
        answer = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
        )
        num_equal += tuple(answer[0, len(prompt) :].tolist()) == found[f"r{i}"]
    return [figure("float32 answers equal to generate", num_equal / len(prompts), "share", 1.0)]


PARTS = {"machine": machine, "kernels": kernels, "copies": copies, "exact": exact}
