"""From an ``EngineConfig`` to an engine that is ready to step."""

from __future__ import annotations

from collections.abc import Callable

from daskserve.core.instance import DEFAULT_BUDGET_TOKENS, EngineConfig, Role
from daskserve.errors import ConfigError
from daskserve.models.catalog import resolve
from daskserve.text.tokenizer import Tokenizer
from daskserve.workers.engine import Engine
from daskserve.workers.forward import Runner
from daskserve.workers.kv_pool import kv_layout, page_bytes
from daskserve.workers.profile import stored_budget

_MOST_DEFAULT_BLOCKS = 65_536  # a million tokens: more is bookkeeping without use

LoadModel = Callable[[EngineConfig], tuple[Runner, Tokenizer]]


def load_model(config: EngineConfig) -> tuple[Runner, Tokenizer]:
    """The runner and the tokenizer of a model (ModelError)."""
    model_dir = resolve(config.model)
    tokenizer = Tokenizer.load(model_dir)
    if config.model == "mock":
        from daskserve.workers.mock import MockRunner

        return MockRunner(config, tokenizer), tokenizer
    # Only here: transformers takes seconds to import, which the mock does not need.
    from daskserve.workers.loader import load_runner

    return load_runner(model_dir, config), tokenizer


def build_engine(role: Role, config: EngineConfig, load: LoadModel = load_model) -> Engine:
    """Load the model and set up its engine and KV pool."""
    runner, tokenizer = load(config)
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        size = page_bytes(runner.shape, runner.dtype, config.block_size, runner.shard)
        num_blocks = min(config.kv_memory_bytes // size, _MOST_DEFAULT_BLOCKS)
        if num_blocks < 1:
            raise ConfigError(
                f"kv_memory_bytes={config.kv_memory_bytes} is less than one KV block"
                f" of {size} bytes"
            )
    return Engine(
        runner,
        runner.new_pool(num_blocks, config.block_size),
        role,
        config,
        tokenizer,
        budget_tokens=_budget_tokens(config),
        kv_layout=kv_layout(config.model, runner.shape, runner.dtype, config.block_size),
    )


def _budget_tokens(config: EngineConfig) -> int:
    if config.prefill_budget_tokens is not None:
        return config.prefill_budget_tokens
    measured = None if config.model == "mock" else stored_budget(config)
    return measured or DEFAULT_BUDGET_TOKENS
