"""What is measured: prefill steps by number and length of prompts, decode steps by batch and
context."""

from __future__ import annotations

from dataclasses import dataclass

from daskserve.core.kv import blocks_for
from daskserve.errors import ConfigError
from daskserve.planner.latency.calibration import Phase

PHASES: tuple[Phase, Phase] = ("prefill", "decode")
LEAST_POINTS = 9
"""Of each phase: what is fitted and what is held out need several."""

TAIL_TOKENS = 8
"""Tokens that a decode measurement adds to every context while it runs."""


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One kind of step.

    Parameters
    ----------
    phase
        ``prefill`` or ``decode``.
    batch
        Prompts of a prefill step, or requests of a decode step.
    tokens
        Length of each prompt, or context of each request.
    """

    phase: Phase
    batch: int
    tokens: int

    @property
    def total_tokens(self) -> int:
        return self.batch * self.tokens

    def pages(self, block_size: int) -> int:
        """KV pages that its requests take."""
        return self.batch * blocks_for(self.tokens + TAIL_TOKENS, block_size)

    def __str__(self) -> str:
        return f"{self.phase} {self.batch} x {self.tokens}"


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranges of a calibration.

    Parameters
    ----------
    num_rounds
        Most times that every point is measured, after a round that warms up and is not used.
    enough_s
        Seconds after which no further round begins, once there are three.
    most_prefill_tokens, most_context_tokens
        Largest prefill step, and most tokens of context in a decode step.
    prompt_counts, prompt_lengths, batch_sizes, contexts
        Combined in all ways that fit. Engines compute a prompt in whole tiles, so that its time
        goes up in stairs: lengths are not those of full tiles, which no traffic has, and need
        odd and even numbers of tiles alike. Decode steps compute requests in such tiles too: their
        time goes up with the first request of a tile, so that the last and the first are there.
    hand_over_tokens, num_hand_overs
        Prompt lengths that are sent through a service, and how often each; of those above, so
        that they are measured as lone steps too.
    service_batches, num_service_rows
        Batches that decode in a service, and how often each: up to the largest, since what each
        request costs there is not the same in small and in large ones.
    traffic_tokens, num_traffic_requests, num_traffic_rounds
        Prompt lengths of mixed traffic, requests of a round, and rounds.
    """

    num_rounds: int
    enough_s: float
    most_prefill_tokens: int
    most_context_tokens: int
    prompt_counts: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    hand_over_tokens: tuple[int, ...]
    num_hand_overs: int
    service_batches: tuple[int, ...]
    num_service_rows: int
    traffic_tokens: tuple[int, ...]
    num_traffic_requests: int
    num_traffic_rounds: int

    def points(
        self, context_tokens: int, max_batch_size: int, num_blocks: int, block_size: int
    ) -> list[Point]:
        """The points that a model's context, an engine's batch and a pool of KV pages allow.

        Raises
        ------
        ConfigError
            Too few are left for a fit.
        """
        found = [
            Point("prefill", count, length)
            for count in self.prompt_counts
            for length in self.prompt_lengths
            if count * length <= self.most_prefill_tokens
        ]
        found += [
            Point("decode", batch, context)
            for batch in self.batch_sizes
            for context in self.contexts
            if batch * context <= self.most_context_tokens
        ]
        allowed = [
            point
            for point in found
            if point.tokens + TAIL_TOKENS <= context_tokens
            and point.batch <= max_batch_size
            and point.pages(block_size) <= num_blocks
        ]
        for phase in PHASES:
            left = sum(point.phase == phase for point in allowed)
            if left < LEAST_POINTS:
                raise ConfigError(
                    f"only {left} {phase} points fit a context of {context_tokens} tokens, batches"
                    f" of {max_batch_size} and {num_blocks} KV pages of {block_size} tokens; at"
                    f" least {LEAST_POINTS} are needed"
                )
        return allowed


FULL = Grid(
    num_rounds=7,
    enough_s=110.0,
    most_prefill_tokens=2048,
    most_context_tokens=32_768,
    prompt_counts=(1, 2, 4, 8),
    prompt_lengths=(9, 24, 55, 70, 104, 150, 246, 330, 505, 1000, 1448, 2040),
    batch_sizes=(1, 2, 4, 8, 16, 17, 24, 32, 33, 48, 49, 64),
    contexts=(32, 128, 512, 1024),
    hand_over_tokens=(24, 104, 505, 1000, 2040),
    num_hand_overs=8,
    service_batches=(1, 2, 4, 8, 16, 32, 64),
    num_service_rows=3,
    traffic_tokens=(24, 55, 70, 104, 150, 246, 330, 505),
    num_traffic_requests=60,
    num_traffic_rounds=9,
)
QUICK = Grid(
    num_rounds=5,
    enough_s=18.0,
    most_prefill_tokens=1024,
    most_context_tokens=16_384,
    prompt_counts=(1, 2, 4),
    prompt_lengths=(9, 55, 104, 246, 505, 1000),
    batch_sizes=(1, 2, 4, 8, 16, 17, 32),
    contexts=(64, 256, 1024),
    hand_over_tokens=(55, 246, 1000),
    num_hand_overs=5,
    service_batches=(1, 4, 8, 32),
    num_service_rows=2,
    traffic_tokens=(55, 104, 246),
    num_traffic_requests=30,
    num_traffic_rounds=3,
)
