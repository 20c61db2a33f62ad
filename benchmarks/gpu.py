"""Checks and times the CUDA path on one GPU, in less than 8 minutes; without one, its CPU branch.

On a GPU: attention kernels against plain torch and against the measured bandwidth,
digests, copies, float32 answers against transformers' generate, steps of a model with the sizes of
Llama 8B (random weights) against bytes over the measured bandwidth and against the measured matrix
product, generate in the same process, and a prefill and a decode instance that share the card as
two processes, over tcp and over UCX. Nothing is downloaded.

Every part is a process with a time limit of its own: one that fails or hangs loses its own figures
only. It needs PyTorch 2.11 or later with CUDA, Triton with a C compiler, transformers and this
package's dependencies; the last part also `pip install 'daskserve[gpu]'`.

Without a GPU the same code runs on the CPU: plain torch in place of PyTorch's varlen_attn, the
Triton kernels through Triton's interpreter, copies through the host. No speed follows from that.

The last line is a JSON list of {"name", "value", "unit", "target", "ok"}.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from typing import Any

import torch

LIMITS_S = {  # 8 minutes in all
    "machine": 40,
    "kernels": 110,
    "copies": 40,
    "exact": 50,
    "engine": 120,
    "service-tcp": 60,
    "service-ucx": 60,
}
QUICK = ("machine", "kernels", "copies", "exact")
RESULT = "RESULT "


def run_part(name: str, rates: dict[str, float], limit_s: float) -> tuple[list[Any], dict]:
    """The figures of a part, and what it has measured of the card."""
    command = [sys.executable, __file__, "--part", name, "--rates", json.dumps(rates)]
    failed = {"name": f"{name} ran to its end", "value": 0, "unit": "yes/no", "target": 1}
    failed["ok"] = False
    print(f"== {name}, at most {limit_s:.0f} s", flush=True)
    started_at = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # with the workers that it has started
        output, _ = process.communicate()
    lines = output.splitlines()
    print("\n".join(line for line in lines if not line.startswith(RESULT)))
    print(
        f"== {name}: {time.monotonic() - started_at:.0f} s, exit {process.returncode}", flush=True
    )
    told = [line for line in lines if line.startswith(RESULT)]
    if not told:
        return [failed], rates
    figures, rates = json.loads(told[-1].removeprefix(RESULT))
    return figures, rates


def part(name: str, rates: dict[str, float]) -> None:
    """One part, in its own process; tells its figures in the last line."""
    import gpu_models
    import gpu_parts

    measured = gpu_parts.Rates(**rates)
    figures = (gpu_parts.PARTS | gpu_models.PARTS)[name](measured)
    told = [figures, {"bytes_per_s": measured.bytes_per_s, "flops": measured.flops}]
    print(RESULT + json.dumps(told), flush=True)


def on_gpu(quick: bool) -> list[Any]:
    """All parts, as far as the time goes."""
    deadline = time.monotonic() + 470
    rates: dict[str, float] = {}
    figures: list[Any] = []
    for name, limit_s in LIMITS_S.items():
        left_s = deadline - time.monotonic()
        if (quick and name not in QUICK) or left_s < 15:
            continue
        found, rates = run_part(name, rates, min(limit_s, left_s))
        figures += found
        print(json.dumps(found), flush=True)
    return figures


def on_cpu(quick: bool) -> list[Any]:
    """The same path with stand-ins for what only a GPU can run."""
    import gpu_parts

    from daskserve.workers.cuda import reference
    from daskserve.workers.cuda.attention import VarlenAttention
    from daskserve.workers.loader import load_device_runner

    torch.set_num_threads(1)
    rates = gpu_parts.Rates()
    varlen = VarlenAttention(reference.varlen_attn)

    def load(folder: Any, config: Any) -> Any:
        return load_device_runner(folder, config, torch.device("cpu"), varlen)

    figures = gpu_parts.copies(rates, "cpu")
    figures += gpu_parts.exact(rates, "cpu", load)
    if importlib.util.find_spec("triton") is None:
        print("Triton is not installed: its kernels are not checked")
        return figures
    command = [sys.executable, "-m", "daskserve.workers.cuda.self_check"]
    told = subprocess.run(
        command + ["--quick"] * quick,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    share = sum(line["is_right"] for line in lines) / max(len(lines), 1)
    name = "interpreted Triton cases that agree with plain torch"
    return [*figures, gpu_parts.figure(name, share, "share", 1.0)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less than a minute; no large model")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--rates", default="{}", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        part(given.part, json.loads(given.rates))
        return 0
    figures = on_gpu(given.quick) if torch.cuda.is_available() else on_cpu(given.quick)
    for line in figures:
        target = "" if line["target"] is None else f"at least {line['target']:g}"
        mark = "" if line["ok"] else "  FALLS SHORT"
        print(f"{line['name']:<62} {line['value']:>10.4g} {line['unit']:<20} {target}{mark}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
