"""As ``virtual_engine``, for colocated instances with pipeline stages.

A wave's step goes through the stages one after the other; the next wave's follows it as soon as
the first stage is free.
"""

from __future__ import annotations

from daskserve.core.instance import EngineConfig, Role
from daskserve.workers.continuous import ContinuousScheduler


def pipelined(engine):
    """The class `VirtualCluster` of the module ``engine``, with pipelines."""
    instance = _instance(engine.Decode)

    class PipelinedCluster(engine.VirtualCluster):
        decode_type = instance

        def _observed(self, decode):
            used, total, active, most = super()._observed(decode)
            return used, total, active, most * decode.times.num_stages

        def _iterate(self, decode, ended):
            if ended is not None:
                decode.open.remove(ended)
                if self._collect(decode, ended):
                    self._bind()
            if decode.step is not None:
                return
            if decode.free_s[0] > self.now:
                self._at(decode.free_s[0], engine.STEP_END, self._iterate, decode, None)
                return
            step = decode.scheduler.next_step()
            if step is None:
                return
            decode.open.append(step)
            self._note_starts(step)
            ends_at = decode.leaves_s(self._seconds(decode, step), self.now)
            self._at(ends_at, engine.STEP_END, self._iterate, decode, step)
            if decode.step is None:
                self._at(decode.free_s[0], engine.STEP_END, self._iterate, decode, None)

    return PipelinedCluster


def _instance(plain):
    class Pipeline(plain):
        def __init__(self, deployment, times):
            super().__init__(deployment, times)
            config = EngineConfig(
                block_size=deployment.block_size,
                chunk_tokens=deployment.chunk_tokens,
                max_batch_size=times.max_batch_size * times.num_stages,
            )
            budget_tokens, num_stages = times.prefill_budget_tokens, times.num_stages
            self.scheduler = ContinuousScheduler(
                self.pool, Role.COLOCATED, config, budget_tokens, num_stages
            )
            self.open = []
            self.free_s = [0.0] * num_stages

        @property
        def step(self):
            """None while another may begin."""
            return self.open[0] if len(self.open) == self.times.num_stages else None

        @step.setter
        def step(self, step):
            pass

        def leaves_s(self, pass_s, now):
            for stage, free_s in enumerate(self.free_s):
                now = self.free_s[stage] = max(now, free_s) + self.times.stage_s(pass_s)
            return now

    return Pipeline
