"""From an ``EngineConfig`` to an engine that is ready to step."""

from __future__ import annotations

from collections.abc import Callable

from daskserve.core.instance import EngineConfig, Role
from daskserve.errors import ConfigError
from daskserve.models.catalog import resolve
from daskserve.text.tokenizer import Tokenizer
from daskserve.workers.engine import Engine
from daskserve.workers.forward import HostRunner, Runner
from daskserve.workers.kv_pool import kv_layout, page_bytes
from daskserve.workers.profile import stored_budget

_MOST_DEFAULT_TOKENS = 2**20  # more is bookkeeping without use

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
    block_size = config.block_size or runner.page_tokens
    num_blocks = config.num_kv_blocks or _num_blocks(runner, config, block_size)
    engine = Engine(
        runner,
        runner.new_pool(num_blocks, block_size),
        role,
        config,
        tokenizer,
        budget_tokens=_budget_tokens(runner, config),
        kv_layout=kv_layout(config.model, runner.shape, runner.dtype, block_size),
    )
    runner.prepare(role)
    return engine


def _num_blocks(runner: Runner, config: EngineConfig, block_size: int) -> int:
    size = page_bytes(runner.shape, runner.dtype, block_size, runner.shard)
    kv_bytes = config.kv_memory_bytes or runner.default_kv_bytes(config)
    if kv_bytes < size:
        raise ConfigError(f"kv_memory_bytes={kv_bytes} is less than one KV block of {size} bytes")
    return min(kv_bytes // size, _MOST_DEFAULT_TOKENS // block_size)


def _budget_tokens(runner: Runner, config: EngineConfig) -> int:
    if config.prefill_budget_tokens is not None:
        return config.prefill_budget_tokens
    is_measurable = isinstance(runner, HostRunner) and runner.is_on_host and config.model != "mock"
    measured = stored_budget(config) if is_measurable else None
    return measured or runner.budget_tokens
