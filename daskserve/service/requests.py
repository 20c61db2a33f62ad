"""From what a caller passes to a request that some instance can finish, or a clear refusal."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from daskserve.core.instance import EngineConfig, InstanceInfo, Role
from daskserve.core.kv import blocks_for
from daskserve.core.params import MAX_SEED, SamplingParams
from daskserve.core.request import Request
from daskserve.errors import ContextOverflow, InvalidParameter, NeverFits
from daskserve.models.catalog import resolve
from daskserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]


class RequestMaker:
    """Tokenizes, checks and numbers prompts.

    Parameters
    ----------
    tokenizer
        Of the model that the instances run.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._numbers = itertools.count(1)
        # Ids begin with a number: Dask groups tasks by the letters at the start of their keys.
        self._suffix = secrets.token_hex(8)

    @classmethod
    def of(cls, config: EngineConfig) -> RequestMaker:
        """For the model of an engine (ModelError)."""
        return cls(Tokenizer.load(resolve(config.model)))

    def make(
        self, prompt: Prompt, params: SamplingParams, instances: Sequence[InstanceInfo]
    ) -> Request:
        """A request ready to submit.

        Parameters
        ----------
        prompt
            Text, token ids, or messages for the chat template.
        params
            ``max_tokens`` is lowered to what the context has left.
        instances
            Those that could take it.

        Raises
        ------
        InvalidParameter
            An empty or malformed prompt.
        ContextOverflow
            No room for even one output token.
        NeverFits
            More KV than any instance's pool holds.
        """
        ids = self._token_ids(prompt)
        context = self.tokenizer.context_tokens
        if len(ids) >= context:
            raise ContextOverflow(
                f"the prompt has {len(ids)} tokens, the model's context {context} with the"
                " answer; shorten the prompt"
            )
        if params.max_tokens > context - len(ids):
            params = replace(params, max_tokens=context - len(ids))
        _check_fits(len(ids), params.max_tokens, instances)
        return Request(
            request_id=f"{next(self._numbers)}-{self._suffix}",
            prompt_token_ids=tuple(ids),
            params=params,
            submitted_at=time.monotonic(),
            seed=params.seed if params.seed is not None else secrets.randbelow(MAX_SEED + 1),
        )

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, list | tuple) or not prompt:
            raise InvalidParameter(
                "prompt", prompt, "must be text, token ids or messages, and not empty"
            )
        if isinstance(prompt[0], dict):
            return self.tokenizer.chat(prompt)
        limit = self.tokenizer.vocab_size
        for token_id in prompt:
            is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not is_id or not 0 <= token_id < limit:
                raise InvalidParameter("prompt", token_id, f"must hold token ids of 0..{limit - 1}")
        return list(prompt)


def _check_fits(num_prompt: int, max_tokens: int, instances: Sequence[InstanceInfo]) -> None:
    """Whether some instance of every role that is needed could ever hold the request."""
    for role in {instance.role for instance in instances}:
        # The last output token is never fed back, so its KV is never needed.
        tokens = num_prompt if role is Role.PREFILL else num_prompt + max_tokens - 1
        of_role = [instance for instance in instances if instance.role is role]
        if all(blocks_for(tokens, i.block_size) > i.num_kv_blocks for i in of_role):
            largest = max(of_role, key=lambda i: i.num_kv_blocks)
            needed = blocks_for(tokens, largest.block_size)
            raise NeverFits(
                f"the request needs {needed} KV blocks for {tokens} tokens, the largest"
                f" {role.value} instance has {largest.num_kv_blocks} of {largest.block_size};"
                " lower max_tokens, shorten the prompt or raise kv_memory_bytes"
            )
