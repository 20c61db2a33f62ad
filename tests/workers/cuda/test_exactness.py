"""The device path on the CPU: tokens equal to ``generate``, whatever the schedule and the pages."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from daskserve.core.instance import Role
from daskserve.models.catalog import resolve
from daskserve.workers.cuda.attention import PlainAttention, VarlenAttention
from daskserve.workers.cuda.pool import DevicePool

MODEL = "tiny-random-llama"
MODES = {
    "whole": dict(roles=[Role.COLOCATED]),
    "chunked": dict(roles=[Role.COLOCATED], chunk_tokens=24),
    "disaggregated": dict(roles=[Role.PREFILL, Role.DECODE]),
}


@functools.cache
def reference_model():
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(resolve(MODEL), dtype=torch.float32).eval()


@functools.cache
def generate(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    output = reference_model().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    return tuple(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_size", [256, 16])
def test_tokens_equal_generate(mode, block_size, rig_type, make_device_engine, make_request):
    options = dict(MODES[mode])
    roles = options.pop("roles")
    engines = [
        make_device_engine(role, MODEL, block_size=block_size, prefill_budget_tokens=64, **options)
        for role in roles
    ]
    paged = engines[0].runner.attention.paged_op
    assert isinstance(paged, VarlenAttention if block_size == 256 else PlainAttention)
    assert all(isinstance(engine.pool, DevicePool) for engine in engines)
    rig = rig_type(*engines)
    requests = [make_request(f"r{n}", n, max_tokens=9) for n in (1, 15, 16, 23, 40, 255, 256, 300)]
    for request in requests:
        rig.submit(request)
    outcomes = rig.run()
    for request in requests:
        answer = outcomes[request.request_id].token_ids
        assert answer == generate(request.prompt_token_ids, 9), request.request_id
    assert rig.used_blocks() == 0


def test_families_are_verified_and_run(family, family_dir, load_on_device):
    """What a layer asks for (windows, soft-capping, scales) reaches the attention of the step."""
    for block_size in (16, 256):
        runner = load_on_device(family_dir(family), block_size=block_size)
        assert runner.device.type == "cpu"
