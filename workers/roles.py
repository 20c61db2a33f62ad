"""What an engine of each role schedules with."""

from __future__ import annotations

from daskserve.core.instance import EngineConfig, Role
from daskserve.workers.continuous import ContinuousScheduler
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.prefill import PrefillScheduler


def scheduler_for(
    role: Role, pool: KVPool, config: EngineConfig, budget_tokens: int, num_waves: int = 1
) -> PrefillScheduler | ContinuousScheduler:
    """A new one, over a pool that may hold KV already.

    Parameters
    ----------
    role, pool, config
        Of the engine.
    budget_tokens
        L_m.
    num_waves
        Most steps that may be open at once.
    """
    if role is Role.PREFILL:
        return PrefillScheduler(pool, budget_tokens, config.max_batch_size)
    return ContinuousScheduler(pool, role, config, budget_tokens, num_waves)
