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

TRAFFIC_SHARES = (0.6, 0.85, 1.1)
"""Loads of mixed traffic, one round of each after the other: light, heavy and a bit too much, as
shares of what the service gets through."""

TRAFFIC_OUTPUT_TOKENS = (8, 48)
"""Fewest and most of a request in mixed traffic."""

_NUM_STEPS = 32
_IN_FLIGHT = 24
"""Requests at a time that show what the service gets through."""
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


def most_context_tokens(batch: int) -> int:
    """Of a request that decodes in such a batch of `decode_steps`."""
    return PROMPT_TOKENS + _most_tokens(batch)


def _most_tokens(batch: int) -> int:
    """The first ones of a batch wait for the last one, so they get more to do."""
    return _NUM_STEPS + batch


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
    """All of a batch at once."""
    outputs = [_most_tokens(batch)] * (batch - 1) + [_NUM_STEPS]
    return await asyncio.gather(*(_sent(service, PROMPT_TOKENS, n) for n in outputs))


def traffic(
    service: Service,
    prompt_tokens: Sequence[int],
    num_requests: int,
    num_rounds: int,
    seed: int = 0,
) -> list[list[Answer]]:
    """Rounds of requests of mixed lengths that arrive whenever they like, at several loads.

    A request that arrives takes time of the cores from whatever step runs just then, so it matters
    that arrivals wait for nothing: users who send the next one after an answer would always meet
    decode steps.
    """
    rng = np.random.default_rng(seed)

    def requests() -> list[tuple[int, int]]:
        low, high = TRAFFIC_OUTPUT_TOKENS
        prompts = rng.choice(prompt_tokens, num_requests).tolist()
        return list(zip(prompts, rng.integers(low, high + 1, num_requests).tolist(), strict=True))

    most_per_s = asyncio.run(_throughput(service, requests()))
    rounds = []
    for number in range(num_rounds):
        rate = TRAFFIC_SHARES[number % len(TRAFFIC_SHARES)] * most_per_s
        due_s = np.cumsum(rng.exponential(1.0 / rate, num_requests)).tolist()
        rounds.append(asyncio.run(_arriving(service, requests(), due_s)))
    return rounds


async def _throughput(service: Service, requests: Sequence[tuple[int, int]]) -> float:
    """Requests per second, some at a time."""
    free = asyncio.Semaphore(_IN_FLIGHT)

    async def send(prompt: int, output: int) -> Answer:
        async with free:
            return await _sent(service, prompt, output)

    answers = await asyncio.gather(*(send(*request) for request in requests))
    began_at = min(one.submitted_at for one in answers)
    return len(answers) / (max(one.ended_at for one in answers) - began_at)


async def _arriving(
    service: Service, requests: Sequence[tuple[int, int]], due_s: Sequence[float]
) -> list[Answer]:
    async def send(prompt: int, output: int, due: float) -> Answer:
        await asyncio.sleep(due)
        return await _sent(service, prompt, output)

    sent = (send(*request, due) for request, due in zip(requests, due_s, strict=True))
    return await asyncio.gather(*sent)


_seeds = itertools.count()


async def _sent(service: Service, prompt_tokens: int, output_tokens: int) -> Answer:
    rng = np.random.default_rng(next(_seeds))
    ids = rng.integers(0, service.tokenizer.vocab_size, prompt_tokens).tolist()
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    request = service.validate(ids, params)
    stream = service.stream_request(request, timeout_s=_TIMEOUT_S)
    timeline = (await stream.completion()).timeline
    return Answer(prompt_tokens, output_tokens - 1, request.submitted_at, timeline)
