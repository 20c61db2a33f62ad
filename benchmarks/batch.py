"""End to end: `daskserve run-batch` against batched `generate` of transformers on the same cores.

Both sides answer the same ragged prompts with the same number of output tokens per row: the end
of sequence is ignored on both, so that every row gives exactly ``max_tokens`` tokens and no side
wins by stopping early. `generate` runs in batches of 32, left-padded, in the order of the file;
both use the same two cores and dtype. Times hold what a user waits for after the model is loaded:
tokenising, all tokens, and for daskserve validation, dispatch, KV transfer, journal and output.

A second part checks that the driver's memory does not grow with the file (mock engine).
The last line is a JSON list of {"name", "value", "unit", "target", "ok"}.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m"
HF_BATCH = 32
CORES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows and tokens, < 60 s")
    parser.add_argument("--rows", type=int, help="prompts (200; quick: 32)")
    parser.add_argument("--max-tokens", type=int, help="output tokens per row (96; quick: 24)")
    parser.add_argument("--memory-rows", type=int, nargs=2, metavar=("FEW", "MANY"))
    parser.add_argument("--part", choices=("all", "speed", "memory"), default="all")
    given = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    figures = []
    if given.part != "memory":
        rows = given.rows or (32 if given.quick else 200)
        figures += speed(rows, given.max_tokens or (24 if given.quick else 96))
    if given.part != "speed":
        few, many = given.memory_rows or ((200, 1000) if given.quick else (2000, 20000))
        figures += memory(few, many)
    print(json.dumps(figures))


def prompts(count: int) -> list[str]:
    """Prompts of public test sets if they lie beside the checkout, else the shipped ones."""
    folder = Path(os.environ.get("DASKSERVE_TRACES", ROOT.parent / "shared" / "data" / "traces"))
    folder = folder / "prompts"
    if not folder.is_dir():
        shipped = Path(__file__).with_name("prompts.jsonl").read_text().splitlines()
        return list(islice(cycle(json.loads(line)["prompt"] for line in shipped), count))
    human = _records(folder / "HumanEval.jsonl.gz")
    grade = _records(folder / "gsm8k_test.jsonl.gz")
    mixed = []
    for code, question in zip(human, grade, strict=False):
        mixed += [code["prompt"], question["question"]]
    return list(islice(cycle(mixed), count))


def _records(path: Path) -> list[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def speed(num_rows: int, max_tokens: int) -> list[dict]:
    texts = prompts(num_rows)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "in.jsonl"
        job.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        print(f"{num_rows} prompts, {max_tokens} output tokens each, bfloat16, {CORES} cores")
        peer = _shown("generate", _in_process("hf", str(job), str(max_tokens)))
        ours = {
            mode: _shown(mode, _in_process("daskserve", str(job), str(max_tokens), mode))
            for mode in ("disaggregated", "colocated")
        }
    assert len({run["tokens"] for run in (peer, *ours.values())}) == 1, "unequal token counts"
    ratios = {mode: _rate(run) / _rate(peer) for mode, run in ours.items()}
    figures = [_figure("hf_generate", _rate(peer), "output tok/s")]
    for mode, run in ours.items():
        figures.append(_figure(mode, _rate(run), "output tok/s"))
        figures.append(_figure(f"{mode}_ratio", ratios[mode], "x generate"))
    best = max(ratios.values())
    return [*figures, _figure("best_ratio", best, "x generate", 1.5, best >= 1.5)]


def _shown(name: str, run: dict) -> dict:
    rate = f"{_rate(run):.1f} output tok/s"
    print(f"  {name:14} {run['tokens']} tokens in {run['s']:.1f} s: {rate}", flush=True)
    return run


def _rate(run: dict) -> float:
    return run["tokens"] / run["s"]


def _figure(name: str, value: float, unit: str, target: float | None = None, ok: bool = True):
    return {"name": name, "value": round(value, 3), "unit": unit, "target": target, "ok": ok}


def _in_process(*arguments: str) -> dict:
    """Each side in a process of its own, so that neither inherits threads or memory."""
    command = [sys.executable, __file__, "--side", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_hf(job: str, max_tokens: str) -> dict:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from daskserve.models import resolve

    torch.set_num_threads(CORES)
    folder = resolve(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    # No end-of-sequence id: every row runs to max_new_tokens.
    settings = GenerationConfig(
        max_new_tokens=int(max_tokens), do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    texts = [json.loads(line)["prompt"] for line in Path(job).read_text().splitlines()]

    def generate(batch: list[str]) -> int:
        inputs = tokenizer(batch, return_tensors="pt", padding=True)
        with torch.inference_mode():
            ids = model.generate(**inputs, generation_config=settings)
        new = ids[:, inputs["input_ids"].shape[1] :]
        tokenizer.batch_decode(new, skip_special_tokens=True)
        return new.numel()

    generate(texts[:2])
    started_at = time.perf_counter()
    tokens = sum(generate(texts[i : i + HF_BATCH]) for i in range(0, len(texts), HF_BATCH))
    return {"tokens": tokens, "s": time.perf_counter() - started_at}


def run_daskserve(job: str, max_tokens: str, mode: str) -> dict:
    from daskserve import EngineConfig, SamplingParams, Service, run_batch

    params = SamplingParams(max_tokens=int(max_tokens), ignore_eos=True)
    placement = {"prefill": 1, "decode": 1}
    if mode == "colocated":
        placement = {"prefill": 0, "decode": 0, "colocated": 1}
    config = EngineConfig(model=MODEL, dtype="bfloat16")
    with Service.local(**placement, config=config) as service:
        run_batch(service, ["Hello"] * 2, Path(job).with_name(f"warm-{mode}.jsonl"))
        output = Path(job).with_name(f"{mode}.jsonl")
        summary = run_batch(service, job, output, params=params, show_progress=False)
    print(summary, file=sys.stderr)
    assert summary.num_failed == 0
    return {"tokens": summary.output_tokens, "s": summary.elapsed_s}


def memory(few: int, many: int) -> list[dict]:
    peaks = {}
    for num_rows in (few, many):
        with tempfile.TemporaryDirectory() as folder:
            job = Path(folder) / "in.jsonl"
            with job.open("w") as file:
                for row in range(num_rows):
                    file.write(json.dumps({"prompt": f"{row} " + "word " * 50}) + "\n")
            run = _in_process("driver", str(job))
        peaks[num_rows] = run["peak_mb"]
        print(
            f"  driver, {num_rows} rows: peak {run['peak_mb']:.1f} MB, "
            f"{num_rows / run['s']:.0f} rows/s"
        )
    growth = peaks[many] - peaks[few]
    name = f"driver_growth_{few}_to_{many}_rows"
    return [_figure(name, growth, "MB", 100, growth <= 100)]


def run_driver(job: str) -> dict:
    import resource

    from daskserve import EngineConfig, SamplingParams, Service, run_batch

    config = EngineConfig(model="mock", mock_prefill_s=0.0, mock_decode_s=0.0)
    with Service.local(prefill=1, decode=1, config=config) as service:
        params = SamplingParams(max_tokens=4)
        output = Path(job).with_name("out.jsonl")
        summary = run_batch(service, job, output, params=params, show_progress=False)
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_mb": peak_kb / 1024, "s": summary.elapsed_s}


SIDES = {"hf": run_hf, "daskserve": run_daskserve, "driver": run_driver}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        print(json.dumps(SIDES[sys.argv[2]](*sys.argv[3:])))
    else:
        main()
