"""A request, what came of it, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from daskserve.core.kv import KVHandle
from daskserve.core.params import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class TokenLogprob(NamedTuple):
    """Log-probability (natural, of the model's raw distribution) of one output token.

    ``top`` holds (token id, log-probability) of the likeliest tokens, best first; the sampled
    token need not be among them.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to answer, as it travels from the client to the instances.

    Parameters
    ----------
    request_id
        Unique for the service; part of the Dask keys ``prefill-<id>`` and ``decode-<id>``.
    prompt_token_ids
        The prompt after chat template and tokenizer, never empty.
    params
        Sampling parameters; ``params.max_tokens`` is already clamped to the context.
    submitted_at
        ``time.monotonic()`` of the submitting process, in seconds.
    seed
        Always set: ``params.seed`` or one drawn at submission, so that a retry repeats the
        same tokens.
    token_sink
        Address to stream tokens to, or None when only the result is wanted.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] = field(repr=False)  # logs must not tell what was asked
    params: SamplingParams
    submitted_at: float
    seed: int
    token_sink: str | None = field(default=None, repr=False)  # holds a secret

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output tokens if the request runs to its limit."""
        return len(self.prompt_token_ids) + self.params.max_tokens


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds spent in each of DistServe's five stages (section 6.3), in the order they happen.

    ``prefill_queue_s`` runs from submission to the start of the prefill step, so it holds the
    dispatch as well; ``decode_queue_s`` from the first token to the first decode step less the
    transfer. ``num_recomputes`` counts prompts computed again after preemption or a lost KV.
    """

    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    kv_transfer_s: float = 0.0
    decode_queue_s: float = 0.0
    decode_s: float = 0.0
    num_recomputes: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to first token: prefill queue and prefill; the prefill instance sends the token."""
        return self.prefill_queue_s + self.prefill_s

    @property
    def total_s(self) -> float:
        return self.ttft_s + self.kv_transfer_s + self.decode_queue_s + self.decode_s

    def tpot_s(self, num_output_tokens: int) -> float | None:
        """Time per output token after the first; None for a single token, which has no TPOT."""
        if num_output_tokens < 2:
            return None
        return (self.total_s - self.ttft_s) / (num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request.

    ``text`` is ``token_ids`` decoded, without special tokens and without the stop string;
    ``token_ids`` holds every sampled token, an end-of-sequence token included; ``logprobs`` one
    entry for each when ``SamplingParams.logprobs`` asked for them.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    timeline: Timeline = field(default_factory=Timeline)
    logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def ttft_s(self) -> float:
        return self.timeline.ttft_s

    @property
    def tpot_s(self) -> float | None:
        return self.timeline.tpot_s(len(self.token_ids))


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The result of a prefill: the first token and where its KV waits to be pulled.

    ``handle`` is None when the request ended with its first token; ``completion`` is set then.
    ``first_token_at`` is on the clock of ``Request.submitted_at``.
    """

    request_id: str
    first_token_id: int
    first_token_at: float
    prefill_queue_s: float
    prefill_s: float
    handle: KVHandle | None
    completion: Completion | None = None
    first_logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one request on their way to the caller.

    ``first_index`` is the position of ``token_ids[0]`` in the output, so that a receiver drops
    what a retry sends again. ``text`` never ends in half a character and never holds a part of
    a stop string. ``logprobs`` has one entry per token when they were asked for.
    """

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
