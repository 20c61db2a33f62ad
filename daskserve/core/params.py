"""What a caller may ask of one generation, checked once at the edge."""

from __future__ import annotations

from dataclasses import dataclass

from daskserve.errors import InvalidParameter

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_SEED = 2**63 - 1
MAX_TOKENS_LIMIT = 1_000_000
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one completion and when to stop.

    Parameters
    ----------
    max_tokens
        Most output tokens, the first one included (1..1,000,000).
    temperature
        0 is greedy; otherwise logits are divided by it (0..2).
    top_p
        Keep the smallest set of tokens whose probability reaches it (0 < top_p <= 1).
    top_k
        Keep the k likeliest tokens; 0 keeps all.
    seed
        With a seed the same request gives the same tokens on any instance; without one
        a fresh seed is drawn per request.
    stop
        Strings that end the text; they are not part of it.
    ignore_eos
        Go on to ``max_tokens`` even when the model ends its answer (for load tests).
    logprobs
        With a number k (0..20) every output token comes with its log-probability and those of
        the k likeliest tokens. They are of the model's own distribution, before temperature,
        top_p and top_k, as OpenAI and vLLM give them. None costs nothing.

    Raises
    ------
    InvalidParameter
        Names the field, the value and the limit.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidParameter("top_p", self.top_p, "must be greater than 0 and at most 1")
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidParameter("ignore_eos", self.ignore_eos, "must be true or false")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        object.__setattr__(self, "stop", _checked_stop(self.stop))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def needs_logits(self) -> bool:
        """Whether more than the likeliest token is needed to choose one, or to report on it."""
        return not self.is_greedy or self.logprobs is not None


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(field, value, "must be an integer")
    if not low <= value <= high:
        raise InvalidParameter(field, value, f"must be {low}..{high}")


def _check_float(field: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameter(field, value, "must be a number")
    if not low <= value <= high:  # NaN neither
        raise InvalidParameter(field, value, f"must be {low:g}..{high:g}")


def _checked_stop(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, tuple | list):
        raise InvalidParameter("stop", stop, "must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidParameter("stop", stop, f"may hold at most {MAX_STOP_STRINGS} strings")
    for text in strings:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidParameter(
                "stop", text, f"must be a string of 1..{MAX_STOP_CHARS} characters"
            )
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise InvalidParameter("stop", text, "must not contain lone surrogates")
    return tuple(strings)
