"""The parts of benchmarks/gpu.py with large models of random weights."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from gpu_parts import BLOCK, Figure, Rates, decode_batch, figure, prompt_batch
from transformers import AutoConfig

from daskserve.core.instance import EngineConfig, Role
from daskserve.core.params import SamplingParams
from daskserve.models.catalog import resolve
from daskserve.workers.attention import ATTENTION_NAME
from daskserve.workers.cuda.runner import DeviceRunner
from daskserve.workers.forward import ModelShape
from daskserve.workers.probe import discover

LLAMA_8B = dict(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
)
LLAMA_1B = LLAMA_8B | dict(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64
)


def random_model(sizes: dict[str, int], attention: str = ATTENTION_NAME) -> torch.nn.Module:
    """A Llama of these sizes with random bfloat16 weights on the card."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**sizes, rope_theta=5e5, tie_word_embeddings=False, eos_token_id=2),
            dtype=torch.bfloat16,
            attn_implementation=attention,
        )
    return model.eval().requires_grad_(False)


def runner_of(model: torch.nn.Module, max_rows: int) -> DeviceRunner:
    """The device path over a model that is there already."""
    facts = discover(model)
    config = model.config
    shape = ModelShape(
        len(facts),
        facts[0].num_kv_heads,
        facts[0].head_dim,
        config.vocab_size,
        config.max_position_embeddings,
        frozenset(),
    )
    device = torch.device("cuda", 0)
    return DeviceRunner(model, facts, shape, torch.bfloat16, device, max_rows)


def engine(rates: Rates) -> list[Figure]:
    """Steps of a model with the sizes of Llama 8B against what the card was measured to do."""
    model = random_model(LLAMA_8B)
    runner = runner_of(model, 64)
    pool = runner.new_pool(64 * 2048 // BLOCK, BLOCK)
    runner.bind(pool.pages)
    weight_bytes = sum(p.nbytes for p in model.parameters()) - model.lm_head.weight.nbytes
    started_at = time.perf_counter()
    runner.prepare(Role.DECODE)
    torch.cuda.synchronize()
    figures = [figure("time to record all decode graphs", time.perf_counter() - started_at, "s")]
    print(f"attention: {runner.attention}; graphs: {runner.num_graphs}", flush=True)
    with torch.inference_mode():
        for rows, context in ((1, 1024), (8, 1024), (32, 1024), (64, 1024)):
            batch = decode_batch(rows, context)
            step_s = _wall_s(lambda b=batch: runner.begin(b, ())())
            needed_bytes = weight_bytes + rows * context * pool.page_bytes / BLOCK
            bound_s = needed_bytes / rates.bytes_per_s
            name = f"8B decode step, {rows} x {context}"
            print(f"{name}: {step_s * 1e3:.2f} ms, bytes alone {bound_s * 1e3:.2f} ms", flush=True)
            figures.append(figure(name, bound_s / step_s, "of bandwidth", 0.4))
        for rows, length in ((1, 1024), (4, 1024), (1, 8000)):
            batch = prompt_batch(rows, length)
            step_s = _wall_s(lambda b=batch: runner.begin(b, ())(), rounds=5)
            flops = 2 * rows * length * (weight_bytes / 2 - model.lm_head.weight.numel())
            flops += 2 * 2 * rows * length**2 / 2 * 4096 * 32
            name = f"8B prefill, {rows} x {length}"
            print(f"{name}: {step_s * 1e3:.1f} ms, {rows * length / step_s:.0f} tok/s", flush=True)
            figures.append(figure(name, flops / step_s / rates.flops, "of the product rate", 0.4))
        figures.append(_beside_copies(runner, pool))
    return figures + _against_generate(model, runner)


def _beside_copies(runner: DeviceRunner, pool: Any) -> Figure:
    """Whether steps take longer while KV is copied out of the pool on another thread."""
    batch = decode_batch(32, 1024)

    def step() -> None:
        runner.begin(batch, ())()

    alone_s = _wall_s(step)
    is_over, num_bytes = threading.Event(), 0

    def copy_out() -> None:
        nonlocal num_bytes
        while not is_over.is_set():
            num_bytes += sum(chunk.nbytes for chunk in pool.outgoing(range(1, 513)).chunks)

    copier = threading.Thread(target=copy_out)
    copier.start()
    started_at = time.perf_counter()
    beside_s = _wall_s(step, rounds=50)
    rate = num_bytes / (time.perf_counter() - started_at)
    is_over.set()
    copier.join()
    print(f"steps while KV leaves at {rate / 1e9:.1f} GB/s: {beside_s * 1e3:.2f} ms", flush=True)
    return figure("8B decode step alone over one beside KV copies", alone_s / beside_s, "x", 0.8)


def _wall_s(run: Callable[[], object], rounds: int = 20) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        started_at = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_at)
    return median(times)


def _against_generate(model: torch.nn.Module, runner: DeviceRunner) -> list[Figure]:
    """Output tokens per second of the same model, batch and context by transformers' generate."""
    rows, length, new = 16, 512, 32
    batch = decode_batch(rows, length)
    ours = rows / _wall_s(lambda: runner.begin(batch, ())())
    model.set_attn_implementation("sdpa")
    ids = torch.randint(3, 1000, (rows, length), device="cuda")
    mask = torch.ones_like(ids)

    def generate(count: int) -> None:
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        model.generate(ids, attention_mask=mask, pad_token_id=0, **options)
        torch.cuda.synchronize()

    generate(2)
    times = []
    for count in (1, 1 + new):
        started_at = time.perf_counter()
        generate(count)
        times.append(time.perf_counter() - started_at)
    theirs = rows * new / (times[1] - times[0])
    print(f"8B decode at batch {rows}: {ours:.0f} tok/s, generate {theirs:.0f}")
    return [figure(f"8B decode at batch {rows} over generate", ours / theirs, "x", 1.5)]


def service(rates: Rates, protocol: str = "tcp") -> list[Figure]:
    """A prefill and a decode instance as two processes on the one card."""
    from daskserve import Service

    params = SamplingParams(max_tokens=64, ignore_eos=True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, 200, 1500).tolist() for _ in range(24)]
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), LLAMA_1B)
        config = EngineConfig(folder, num_kv_blocks=4096, block_size=BLOCK, max_batch_size=32)
        with Service.local(config=config, device="cuda", protocol=protocol) as served:
            alone = [served.submit(prompt, params).result(timeout=60) for prompt in prompts[:4]]
            answers = [future.result(timeout=60) for future in served.map(prompts, params)]
    moved_s = min(answer.timeline.kv_transfer_s for answer in alone)
    recomputed = sum(answer.timeline.num_recomputes > 0 for answer in answers + alone)
    kv_bytes = 1500 * 16 * 2 * 8 * 64 * 2
    print(f"{protocol}: KV of {kv_bytes / 1e6:.0f} MB in {moved_s * 1e3:.1f} ms", flush=True)
    came = 1 - recomputed / len(answers + alone)
    tpot_s = median(answer.tpot_s for answer in answers)
    return [
        figure(f"1B on one card: requests whose KV came over {protocol}", came, "share", 1.0),
        figure(f"1B on one card: KV over {protocol}", kv_bytes / moved_s / 1e9, "GB/s"),
        figure(f"1B on one card: TPOT of 24 requests, {protocol}", tpot_s * 1e3, "ms"),
    ]


def save_model(folder: Path, sizes: dict[str, int]) -> None:
    """A model directory with random weights of these sizes and a small tokenizer."""
    source = resolve("tiny-random-llama")
    words = AutoConfig.from_pretrained(source)
    model = random_model(sizes | {"vocab_size": words.vocab_size}, "sdpa")
    model.config.eos_token_id = model.generation_config.eos_token_id = words.eos_token_id
    model.to("cpu").save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder / name)
    torch.cuda.empty_cache()


PARTS = {
    "engine": engine,
    "service-tcp": service,
    "service-ucx": lambda rates: service(rates, "ucx"),
}
