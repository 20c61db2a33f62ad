"""The engine against transformers on the same cores: `generate` with a static cache, and its own
continuous batching, both with the same model folder, dtype and number of threads.

Fixed shapes: 512 prompt tokens, batches of 1, 8 and 32. A ragged job: real prompts of unequal
length, all given at once. Every request runs to its limit on every side, so token counts are
equal. Ours is a whole colocated instance: scheduling, paged KV, sampling and detokenisation are in
its times. Each side and setting has a process of its own; medians of several rounds.
The last line is a JSON list of {"name", "value", "unit", "target", "ok"}.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODEL = "smollm2-135m"
PROMPT_TOKENS = 512
TARGETS = {"decode_1": 1.3, "decode_8": 1.5, "decode_32": 1.5, "prefill": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="bf16, 2 threads, small: < 60 s")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="this one only")
    parser.add_argument("--threads", type=int, help="so many only")
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    settings = [("bfloat16", min(2, cores))]
    if not given.quick:
        settings += [("bfloat16", 1), ("float32", min(2, cores)), ("float32", 1)]
    plan = _plan(given.quick)
    sides = [side for side in SIDES if side != "openvino"]
    if importlib.util.find_spec("openvino_genai") is None:
        print("OpenVINO GenAI is not installed: the distance to it is not measured here")
    else:
        sides.append("openvino")
    figures = []
    for dtype, threads in settings:
        if given.dtype not in (None, dtype) or given.threads not in (None, threads):
            continue
        is_main = (dtype, threads) == settings[0]
        figures += compare(dtype, threads, plan, sides, is_main)
    print(json.dumps(figures))


def _plan(quick: bool) -> dict:
    if quick:
        return {"batches": [1, 8], "tokens": 16, "rounds": 1, "rows": 6, "job_tokens": 12}
    return {"batches": [1, 8, 32], "tokens": 24, "rounds": 2, "rows": 12, "job_tokens": 24}


def compare(dtype: str, threads: int, plan: dict, names: list[str], is_main: bool) -> list[dict]:
    """One setting: all sides, the table, and the figures with their targets."""
    sides = {side: _in_process(side, dtype, threads, plan) for side in names}
    ours, peer = sides["daskserve"], {**sides["generate"], **sides["continuous"]}
    openvino = sides.get("openvino", {})
    print(f"\n{dtype}, {threads} thread(s), {PROMPT_TOKENS} prompt tokens; tok/s")
    print(f"  {'':14}{'daskserve':>10}{'transformers':>14}{'ratio':>7}", end="")
    print(f"{'OpenVINO GenAI':>16}{'ratio':>7}" if openvino else "")
    figures = []
    for name in ours:
        ratio = ours[name] / peer[name]
        print(f"  {name:14}{ours[name]:10.0f}{peer[name]:14.0f}{ratio:7.2f}", end="")
        label = f"{name}_{dtype}_{threads}t"
        figures.append(_figure(label, ours[name], "tok/s"))
        # The targets are for bfloat16 on two threads; other settings are for orientation.
        target = TARGETS.get(name) if is_main else None
        figures.append(_figure(f"{label}_ratio", ratio, "x transformers", target))
        if openvino:
            distance = ours[name] / openvino[name]
            figures.append(_figure(f"{label}_openvino_ratio", distance, "x OpenVINO GenAI"))
            print(f"{openvino[name]:16.0f}{distance:7.2f}", end="")
        print()
    return figures


def _figure(name: str, value: float, unit: str, target: float | None = None) -> dict:
    ok = target is None or value >= target
    return {"name": name, "value": round(value, 3), "unit": unit, "target": target, "ok": ok}


def _in_process(side: str, dtype: str, threads: int, plan: dict) -> dict[str, float]:
    command = [sys.executable, __file__, "--side", side, dtype, str(threads), json.dumps(plan)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def ragged_prompts(tokenizer, rows: int) -> list[list[int]]:
    """Real prompts, shipped beside this file."""
    lines = Path(__file__).with_name("prompts.jsonl").read_text().splitlines()[:rows]
    return [tokenizer.encode(json.loads(line)["prompt"]) for line in lines]


def fixed_prompts(batch: int) -> list[list[int]]:
    """Different token ids in every row, none of them special."""
    return [
        [100 + (7 * i + 13 * row) % 40_000 for i in range(PROMPT_TOKENS)] for row in range(batch)
    ]


def median_of(rounds: int, measure) -> float:
    return statistics.median(measure() for _ in range(rounds))


def run_daskserve(dtype: str, threads: int, plan: dict) -> dict[str, float]:
    from daskserve import EngineConfig, Role
    from daskserve.models import resolve
    from daskserve.text.tokenizer import Tokenizer
    from daskserve.workers.instance import Instance

    config = EngineConfig(model=MODEL, dtype=dtype, num_threads=threads)
    instance = Instance(Role.COLOCATED, config)
    instance.start()
    prompts = ragged_prompts(Tokenizer.load(resolve(MODEL)), plan["rows"])

    async def measure() -> dict[str, float]:
        await _answer(instance, fixed_prompts(2), 4)
        figures = {}
        for batch in plan["batches"]:
            rates = [
                await _answer(instance, fixed_prompts(batch), plan["tokens"])
                for _ in range(plan["rounds"])
            ]
            if batch == 1:
                figures["prefill"] = statistics.median(rate["prefill"] for rate in rates)
            figures[f"decode_{batch}"] = statistics.median(rate["decode"] for rate in rates)
        jobs = [await _answer(instance, prompts, plan["job_tokens"]) for _ in range(plan["rounds"])]
        figures["ragged_job"] = statistics.median(job["all"] for job in jobs)
        await instance.close()
        return figures

    return asyncio.run(measure())


async def _answer(instance, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Rates of one batch: prompt tokens to the first token, output tokens after all first ones."""
    from daskserve import Request, SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    first_at: dict[str, float] = {}
    num_before = 0

    def on_token(delta) -> None:
        nonlocal num_before
        if len(first_at) < len(prompts):
            num_before += len(delta.token_ids)
        first_at.setdefault(delta.request_id, time.perf_counter())

    started_at = time.perf_counter()
    requests = [
        Request(f"r{row}", tuple(ids), params, time.monotonic(), seed=0)
        for row, ids in enumerate(prompts)
    ]
    await asyncio.gather(*(instance.generate(request, on_token) for request in requests))
    ended_at, all_first_at = time.perf_counter(), max(first_at.values())
    num_output = tokens * len(prompts)
    return {
        "prefill": sum(map(len, prompts)) / (all_first_at - started_at),
        "decode": (num_output - num_before) / (ended_at - all_first_at),
        "all": num_output / (ended_at - started_at),
    }


def _load_transformers(dtype: str, threads: int, **options):
    import torch
    from transformers import AutoModelForCausalLM

    from daskserve.models import resolve

    torch.set_num_threads(threads)
    folder = resolve(MODEL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **options)
    return torch, model.eval(), folder


def run_generate(dtype: str, threads: int, plan: dict) -> dict[str, float]:
    torch, model, _ = _load_transformers(dtype, threads)
    from transformers import GenerationConfig

    def seconds(batch: int, tokens: int) -> float:
        ids = torch.tensor(fixed_prompts(batch))
        settings = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, cache_implementation="static", pad_token_id=0
        )
        started_at = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        return time.perf_counter() - started_at

    figures, tokens = {}, plan["tokens"]
    for batch in plan["batches"]:
        seconds(batch, 2)  # a new shape costs the first call more
        first_s = median_of(plan["rounds"], lambda batch=batch: seconds(batch, 1))
        all_s = median_of(plan["rounds"], lambda batch=batch: seconds(batch, tokens))
        if batch == 1:
            figures["prefill"] = PROMPT_TOKENS / first_s
        figures[f"decode_{batch}"] = batch * (tokens - 1) / (all_s - first_s)
    return figures


def run_continuous(dtype: str, threads: int, plan: dict) -> dict[str, float]:
    """transformers' continuous batching over the ragged job."""
    options = {"attn_implementation": "sdpa"}
    torch, model, folder = _load_transformers(dtype, threads, **options)
    from transformers import GenerationConfig

    from daskserve.text.tokenizer import Tokenizer

    prompts = ragged_prompts(Tokenizer.load(folder), plan["rows"])
    tokens = plan["job_tokens"]
    settings = GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def rate() -> float:
        started_at = time.perf_counter()
        with torch.inference_mode():
            outputs = model.generate_batch(
                inputs=prompts, generation_config=settings, progress_bar=False
            )
        elapsed_s = time.perf_counter() - started_at
        num_output = sum(len(output.generated_tokens) for output in outputs.values())
        if num_output != tokens * len(prompts):
            raise RuntimeError(f"{num_output} tokens came, {tokens * len(prompts)} were asked")
        return num_output / elapsed_s

    return {"ragged_job": median_of(min(2, plan["rounds"]), rate)}


def run_openvino(dtype: str, threads: int, plan: dict) -> dict[str, float]:
    import openvino_peer

    from daskserve.models import resolve
    from daskserve.text.tokenizer import Tokenizer

    folder = resolve(MODEL)
    prompts = ragged_prompts(Tokenizer.load(folder), plan["rows"])
    return openvino_peer.measure(folder, dtype, threads, plan, fixed_prompts, prompts)


SIDES = {
    "daskserve": run_daskserve,
    "generate": run_generate,
    "continuous": run_continuous,
    "openvino": run_openvino,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        side, dtype, threads, plan = sys.argv[2:]
        print(json.dumps(SIDES[side](dtype, int(threads), json.loads(plan))))
    else:
        main()
