"""Every family gives the plain model's logits, however its requests are scheduled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from daskserve.core.instance import EngineConfig
from daskserve.errors import ModelError
from daskserve.workers.forward import ForwardBatch
from daskserve.workers.fused import FusedDecoder
from daskserve.workers.layer_attention import LayerAttention
from daskserve.workers.loader import load_runner
from daskserve.workers.runner import ModelRunner

PROMPT_LENGTHS = (13, 1, 26, 7, 90)
NUM_NEW = 6


class Rows:
    """Requests with shuffled pages that are fed to a runner in any order and size."""

    def __init__(self, runner: ModelRunner, prompts: list[list[int]], block_size: int) -> None:
        self.runner = runner
        self.tokens = [list(prompt) for prompt in prompts]
        self.cached = [0] * len(prompts)
        pages_each = -(-(max(map(len, prompts)) + NUM_NEW) // block_size)
        order = np.random.default_rng(1).permutation(pages_each * len(prompts)) + 1
        self.table = order.reshape(len(prompts), pages_each).astype(np.int32)
        shape = runner.shape
        runner.bind(
            torch.full(
                (order.size + 1, shape.num_layers, 2, shape.num_kv_heads, block_size)
                + (shape.head_dim,),
                torch.nan,  # whatever is read before it was written shows
                dtype=runner.dtype,
            )
        )

    def step(self, sizes: dict[int, int]) -> torch.Tensor:
        """Feed ``sizes[row]`` tokens of each row; the logits of each row's last token."""
        rows = list(sizes)
        spans = [range(self.cached[r], self.cached[r] + sizes[r]) for r in rows]
        for r in rows:
            self.cached[r] += sizes[r]
        return self.runner.forward(
            ForwardBatch(
                token_ids=np.array(
                    [self.tokens[r][p] for r, s in zip(rows, spans, strict=True) for p in s],
                    dtype=np.int64,
                ),
                positions=np.array([p for s in spans for p in s], dtype=np.int64),
                query_start=np.cumsum([0, *map(len, spans)], dtype=np.int32),
                context_tokens=np.array([self.cached[r] for r in rows], dtype=np.int32),
                page_table=self.table[rows],
            )
        )

    def generate(self, schedule: list[dict[int, int]]) -> list[list[int]]:
        """Run the schedule over the prompts, then decode all rows together, greedily."""
        for sizes in schedule:
            logits = self.step(sizes)
            for row, row_logits in zip(sizes, logits, strict=True):
                if self.cached[row] == len(self.tokens[row]):
                    self.tokens[row].append(int(row_logits.argmax()))
        prompt_lengths = [c for c in self.cached]
        for _ in range(NUM_NEW - 1):
            logits = self.step({row: 1 for row in range(len(self.tokens))})
            for tokens, row_logits in zip(self.tokens, logits, strict=True):
                tokens.append(int(row_logits.argmax()))
        return [t[n:] for t, n in zip(self.tokens, prompt_lengths, strict=True)]


ALONE = [{row: n} for row, n in enumerate(PROMPT_LENGTHS)]
BATCHED = [dict(enumerate(PROMPT_LENGTHS))]
CHUNKED = [{0: 5, 2: 9, 4: 17}, {0: 8, 2: 9, 4: 40, 1: 1}, {2: 8, 4: 33, 3: 7}]


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, 200, n).tolist() for n in PROMPT_LENGTHS]


def generated(model_dir: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]


def check_schedules(model_dir: Path, num_threads: int, block_size: int) -> ModelRunner:
    runner = load_runner(model_dir, EngineConfig(dtype="float32", num_threads=num_threads))
    expected = generated(model_dir)
    for schedule in (ALONE, BATCHED, CHUNKED):
        assert Rows(runner, prompts(), block_size).generate(schedule) == expected
    return runner


def test_every_family_equals_generate_under_every_schedule(family, family_dir) -> None:
    check_schedules(family_dir(family), num_threads=1, block_size=4)


@pytest.mark.parametrize("num_threads", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_compiled_step_equals_generate(fused_family, num_threads, family_dir) -> None:
    runner = check_schedules(family_dir(fused_family), num_threads, block_size=16)
    assert isinstance(runner.compiled, FusedDecoder)


def test_the_compiled_attention_equals_generate(attended_family, family_dir) -> None:
    runner = check_schedules(family_dir(attended_family), num_threads=1, block_size=32)
    assert isinstance(runner.compiled, LayerAttention)


def test_bfloat16_is_near_float32(family, family_dir) -> None:
    check_bfloat16(family_dir(family))


def test_the_compiled_step_in_bfloat16_is_near_float32(fused_family, family_dir) -> None:
    check_bfloat16(family_dir(fused_family))


def test_the_compiled_attention_in_bfloat16_is_near_float32(attended_family, family_dir) -> None:
    check_bfloat16(family_dir(attended_family))


def check_bfloat16(model_dir: Path) -> None:
    exact = load_runner(model_dir, EngineConfig(dtype="float32", num_threads=1))
    coarse = load_runner(model_dir, EngineConfig(dtype="bfloat16", num_threads=1))
    for schedule in (BATCHED, CHUNKED):
        rows = [Rows(runner, prompts(), block_size=16) for runner in (exact, coarse)]
        for sizes in schedule:
            logits, near = (row.step(sizes).clone() for row in rows)
        assert near.dtype == torch.float32
        assert (logits - near).square().mean().sqrt() / logits.std() < 0.1


def test_a_model_that_bypasses_the_attention_function_is_refused_by_name(family_dir) -> None:
    with pytest.raises(ModelError, match="FalconForCausalLM"):
        load_runner(family_dir("falcon"), EngineConfig(dtype="float32"))


def test_a_directory_without_a_model_is_refused(tmp_path) -> None:
    with pytest.raises(ModelError, match="no config.json"):
        load_runner(tmp_path, EngineConfig())


def test_a_pool_of_another_shape_is_refused(family_dir) -> None:
    runner = load_runner(family_dir("llama"), EngineConfig(dtype="float32", num_threads=1))
    with pytest.raises(ModelError, match="does not fit"):
        runner.bind(torch.zeros(3, 3, 2, 1, 4, 16))
