"""Steps as a running service makes them: batches of decodes, alone and beside prompts.

What a step costs in a service is more than the step: tokens are sent from the same core, and the
instances compete for memory, caches and the cores of everything else. Requests are sent so that
each timeline shows one kind of step.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daskserve.core.params import SamplingParams
from daskserve.core.request import Timeline
from daskserve.service import Service

PROMPT_TOKENS = 16
"""Of what decodes: short, so that a batch is soon together."""

BESIDE_TOKENS = 104
"""Of each prompt that is computed beside decoding; its steps are measured alone too."""

_NUM_STEPS = 32
_TIMEOUT_S = 300.0
_BESIDE_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Decode steps of one batch in a row.

    Parameters
    ----------
    context_tokens
        Sum over the batch, in the middle of the row.
    step_s
        Mean seconds of a step.
    is_beside
        Whether prompts were computed all the while.
    """

    batch: int
    context_tokens: float
    step_s: float
    is_beside: bool


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Prompts of one step that was made beside a batch of ``batch`` decodes."""

    lengths: tuple[int, ...]
    batch: int
    step_s: float


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came of a request, on the service's clock."""

    prompt_tokens: int
    num_gaps: int
    submitted_at: float
    timeline: Timeline

    @property
    def prefill_at(self) -> float:
        return self.submitted_at + self.timeline.prefill_queue_s

    @property
    def ended_at(self) -> float:
        return self.submitted_at + self.timeline.total_s

    @property
    def decode_at(self) -> float:
        return self.ended_at - self.timeline.decode_s


def decode_steps(
    service: Service, batches: Sequence[int], repeats: int, seed: int = 0
) -> list[DecodeSteps]:
    """Batches that decode with the service to themselves."""
    order = np.random.default_rng(seed).permutation(np.repeat(batches, repeats)).tolist()
    return [_row(asyncio.run(_together(service, batch)), False) for batch in order]


def steps_beside(
    service: Service, batches: Sequence[int], repeats: int, seed: int = 0
) -> tuple[list[DecodeSteps], list[PrefillStep]]:
    """Batches that decode on one instance while another computes one prompt after the other."""
    order = np.random.default_rng(seed).permutation(np.repeat(batches, repeats)).tolist()
    decodes, prefills = [], []
    for batch in order:
        decoded, computed = asyncio.run(_beside(service, batch))
        row = _row(decoded, True)
        begins_at = max(one.decode_at for one in decoded)
        ends_at = min(one.ended_at for one in decoded)
        decodes.append(row)
        prefills += [
            PrefillStep(tuple(one.prompt_tokens for one in step), batch, step[0].timeline.prefill_s)
            for step in _steps_of(computed)
            if begins_at <= step[0].prefill_at and step[0].ended_at <= ends_at
        ]
    return decodes, prefills


def _row(decoded: Sequence[_Answer], is_beside: bool) -> DecodeSteps:
    """The one that began last decodes with all others from its first to its last step."""
    last = max(decoded, key=lambda one: one.decode_at)
    # Each has its prompt, a token from its prefill, and what came in half of the row.
    context = len(decoded) * (PROMPT_TOKENS + 1 + last.num_gaps / 2)
    return DecodeSteps(len(decoded), context, last.timeline.decode_s / last.num_gaps, is_beside)


def _steps_of(computed: Sequence[_Answer]) -> list[list[_Answer]]:
    """Prompts that began and ended at the same moments were computed in one step."""
    steps = defaultdict(list)
    for one in computed:
        steps[round(one.prefill_at, 4), round(one.ended_at, 4)].append(one)
    return list(steps.values())


async def _together(service: Service, batch: int) -> list[_Answer]:
    """All of a batch at once; the first ones wait for the last one, so they get more to do."""
    most = _NUM_STEPS + batch
    outputs = [most] * (batch - 1) + [_NUM_STEPS]
    return await asyncio.gather(*(_sent(service, PROMPT_TOKENS, n) for n in outputs))


async def _beside(service: Service, batch: int) -> tuple[list[_Answer], list[_Answer]]:
    computed: list[_Answer] = []

    async def compute() -> None:
        while not decoding.done():
            computed.append(await _sent(service, BESIDE_TOKENS, 1))

    # Prompts are served in order: these begin as soon as the batch has its first tokens.
    decoding = asyncio.ensure_future(_together(service, batch))
    await asyncio.sleep(0)
    await asyncio.gather(decoding, *(compute() for _ in range(_BESIDE_IN_FLIGHT)))
    return decoding.result(), computed


_seeds = itertools.count()


async def _sent(service: Service, prompt_tokens: int, output_tokens: int) -> _Answer:
    rng = np.random.default_rng(next(_seeds))
    ids = rng.integers(0, service.tokenizer.vocab_size, prompt_tokens).tolist()
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    request = service.validate(ids, params)
    stream = service.stream_request(request, timeout_s=_TIMEOUT_S)
    timeline = (await stream.completion()).timeline
    return _Answer(prompt_tokens, output_tokens - 1, request.submitted_at, timeline)
