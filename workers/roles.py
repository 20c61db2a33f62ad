"""What an engine of each role schedules with."""

from __future__ import annotations

from daskserve.core.instance import EngineConfig, Role
from daskserve.workers.continuous import ContinuousScheduler
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.prefill import PrefillScheduler


def scheduler_for(
    role: Role, pool: KVPool, config: EngineConfig, budget_tokens: int
) -> PrefillScheduler | ContinuousScheduler:
    """A new one, over a pool that may hold KV already; ``budget_tokens`` is L_m."""
    if role is Role.PREFILL:
        return PrefillScheduler(pool, budget_tokens, config.max_batch_size)
    return ContinuousScheduler(pool, role, config, budget_tokens)
