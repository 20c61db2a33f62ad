"""Requests sent to a service so that their timelines show its steps: batches, and mixed traffic.

What a step costs in a service is more than the step: tokens are sent from the same core, and the
instances compete for memory, caches and the cores of everything else.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daskserve.core.params import SamplingParams
from daskserve.core.request import Timeline
from daskserve.service import Service

PROMPT_TOKENS = 16
"""Of what decodes in batches: short, so that a batch is soon together."""

TRAFFIC_IN_FLIGHT = (6, 12, 24)
"""Requests at a time in one round of mixed traffic after the other: light, middling and heavy."""

TRAFFIC_OUTPUT_TOKENS = (8, 48)
"""Fewest and most of a request in mixed traffic."""

_NUM_STEPS = 32
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Decode steps of one batch in a row.

    Parameters
    ----------
    context_tokens
        Sum over the batch, in the middle of the row.
    step_s
        Mean seconds of a step.
    """

    batch: int
    context_tokens: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request, in seconds on the service's clock.

    Parameters
    ----------
    num_gaps
        Tokens after the first.
    """

    prompt_tokens: int
    num_gaps: int
    submitted_at: float
    timeline: Timeline

    @property
    def prefill_at(self) -> float:
        return self.submitted_at + self.timeline.prefill_queue_s

    @property
    def first_token_at(self) -> float:
        return self.submitted_at + self.timeline.ttft_s

    @property
    def decode_at(self) -> float:
        return self.ended_at - self.timeline.decode_s

    @property
    def ended_at(self) -> float:
        return self.submitted_at + self.timeline.total_s


def decode_steps(
    service: Service, batches: Sequence[int], repeats: int, seed: int = 0
) -> list[DecodeSteps]:
    """Batches that decode with the service to themselves."""
    order = np.random.default_rng(seed).permutation(np.repeat(batches, repeats)).tolist()
    return [_row(asyncio.run(_together(service, batch))) for batch in order]


def _row(decoded: Sequence[Answer]) -> DecodeSteps:
    """The one that began last decodes with all others from its first to its last step."""
    last = max(decoded, key=lambda one: one.decode_at)
    # Each has its prompt, a token from its prefill, and what came in half of the row.
    context = len(decoded) * (PROMPT_TOKENS + 1 + last.num_gaps / 2)
    return DecodeSteps(len(decoded), context, last.timeline.decode_s / last.num_gaps)


async def _together(service: Service, batch: int) -> list[Answer]:
    """All of a batch at once; the first ones wait for the last one, so they get more to do."""
    most = _NUM_STEPS + batch
    outputs = [most] * (batch - 1) + [_NUM_STEPS]
    return await asyncio.gather(*(_sent(service, PROMPT_TOKENS, n) for n in outputs))


def traffic(
    service: Service, prompt_tokens: Sequence[int], num_requests: int, seed: int = 0
) -> list[Answer]:
    """Requests of mixed lengths, as many in flight as keep both kinds of instances at work.

    ``seed`` counts the rounds, of which every one has another load.
    """
    rng = np.random.default_rng(seed)
    prompts = rng.choice(prompt_tokens, num_requests).tolist()
    low, high = TRAFFIC_OUTPUT_TOKENS
    outputs = rng.integers(low, high + 1, num_requests).tolist()
    most = TRAFFIC_IN_FLIGHT[seed % len(TRAFFIC_IN_FLIGHT)]
    return asyncio.run(_in_flight(service, list(zip(prompts, outputs, strict=True)), most))


async def _in_flight(
    service: Service, requests: Sequence[tuple[int, int]], most: int
) -> list[Answer]:
    free = asyncio.Semaphore(most)

    async def send(prompt: int, output: int) -> Answer:
        async with free:
            return await _sent(service, prompt, output)

    return await asyncio.gather(*(send(*request) for request in requests))


_seeds = itertools.count()


async def _sent(service: Service, prompt_tokens: int, output_tokens: int) -> Answer:
    rng = np.random.default_rng(next(_seeds))
    ids = rng.integers(0, service.tokenizer.vocab_size, prompt_tokens).tolist()
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    request = service.validate(ids, params)
    stream = service.stream_request(request, timeout_s=_TIMEOUT_S)
    timeline = (await stream.completion()).timeline
    return Answer(prompt_tokens, output_tokens - 1, request.submitted_at, timeline)
