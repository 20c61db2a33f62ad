"""From snapshots to rows: rates and percentiles of the requests of the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from daskserve.core.instance import Role
from daskserve.core.slo import SLO
from daskserve.observe.finished import Finished
from daskserve.observe.sample import InstanceSample, Percentiles, Sample
from daskserve.observe.snapshot import InstanceFigures, Snapshot

_SHARES = (50, 90, 99)
_SILENT_S = 10.0
"""An instance that has told nothing for so long is shown as silent."""


class Window:
    """Keeps the requests and counters of the last ``window_s`` seconds.

    Parameters
    ----------
    slo
        Instead of the service's own.
    """

    def __init__(self, window_s: float, slo: SLO | None = None) -> None:
        self.window_s = window_s
        self._slo = slo
        # From and until when, and what was finished in between as far as it was told.
        self._looks: deque[tuple[float, float, tuple[Finished, ...]]] = deque()
        self._counts: deque[tuple[float, int, int]] = deque()  # (now, arrived, failed)
        self._tokens: dict[str, tuple[float, int, float]] = {}  # address: (at, tokens, per second)

    def sample(self, snapshot: Snapshot) -> Sample:
        """The row of this moment; snapshots must come in order."""
        slo = self._slo or snapshot.slo
        span_s = self._advance(snapshot)
        finished = [one for _, _, told in self._looks for one in told]
        ttft = np.array([one.ttft_s for one in finished])
        tpots = [one.tpot_s for one in finished]
        tpot = np.array([np.nan if one is None else one for one in tpots], float)
        instances = tuple(self._instance(one, snapshot.now) for one in snapshot.instances)
        num_gpus = sum(one.num_gpus for one in instances)
        attained = None
        if slo is not None:
            attained = (ttft <= slo.ttft_s) & ~(tpot > slo.tpot_s)
        return Sample(
            at=snapshot.at,
            window_s=self.window_s,
            model=snapshot.model,
            slo=slo,
            arrived_per_s=self._per_s(1),
            finished_per_s=len(ttft) / span_s,
            failed_per_s=self._per_s(2),
            attainment=float(attained.mean()) if attained is not None and len(ttft) else None,
            goodput_per_gpu=float(attained.sum()) / span_s / num_gpus
            if attained is not None and num_gpus
            else None,
            prompt_tokens_per_s=sum(one.prompt_tokens for one in finished) / span_s,
            output_tokens_per_s=sum(one.output_tokens for one in finished) / span_s,
            ttft_s=_percentiles(ttft),
            tpot_s=_percentiles(tpot[~np.isnan(tpot)]),
            waiting=_waiting(snapshot, instances),
            num_running=sum(one.num_running for one in instances),
            instances=instances,
        )

    def _advance(self, snapshot: Snapshot) -> float:
        """Take in what is new and drop what is old; the seconds that is kept of."""
        now = snapshot.now
        if self._counts and now < self._counts[-1][0]:  # another scheduler, another clock
            self._looks.clear()
            self._counts.clear()
            self._tokens.clear()
        oldest = now - self.window_s
        if self._looks:
            self._looks.append((self._looks[-1][1], now, snapshot.finished))
        else:
            recent = tuple(one for one in snapshot.finished if one.finished_at >= oldest)
            self._looks.append((oldest, now, recent))
        self._counts.append((now, snapshot.num_arrived, snapshot.num_failed))
        while self._looks[0][1] <= oldest:
            self._looks.popleft()
        while len(self._counts) > 2 and self._counts[0][0] < oldest:
            self._counts.popleft()
        return max(now - self._looks[0][0], 1e-9)

    def _per_s(self, column: int) -> float:
        first, last = self._counts[0], self._counts[-1]
        span_s = last[0] - first[0]
        return max(last[column] - first[column], 0) / span_s if span_s > 0 else 0.0

    def _instance(self, one: InstanceFigures, now: float) -> InstanceSample:
        load, place = one.load, one.place
        num_blocks = load.used_kv_blocks + load.free_kv_blocks
        is_silent = one.state == "ready" and now - one.at > _SILENT_S
        return InstanceSample(
            name=place.name or one.address,
            address=one.address,
            role=one.role,
            state="silent" if is_silent else one.state,
            host=place.host,
            device=place.device,
            tp=place.tp,
            pp=place.pp,
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            num_holding=load.num_holding,
            kv_share=load.used_kv_blocks / num_blocks if num_blocks else 0.0,
            tokens_per_s=0.0 if is_silent else self._tokens_per_s(one),
            error=one.error,
        )

    def _tokens_per_s(self, one: InstanceFigures) -> float:
        """Between the last two times that the instance told its counters."""
        at, tokens, per_s = self._tokens.get(one.address, (one.at, one.load.num_tokens, 0.0))
        if one.at > at:
            per_s = max(one.load.num_tokens - tokens, 0) / (one.at - at)
        self._tokens[one.address] = (one.at, one.load.num_tokens, per_s)
        return per_s


def _percentiles(values: np.ndarray) -> Percentiles:
    if not len(values):
        return Percentiles()
    return Percentiles(*(float(value) for value in np.percentile(values, _SHARES)))


def _waiting(snapshot: Snapshot, instances: Sequence[InstanceSample]) -> dict[str, int]:
    """Requests before each stage: in dispatch and in the queues of the instances."""

    def in_dispatch(role: Role) -> int:
        return (snapshot.roles or {}).get(role.value, {}).get("waiting", 0)

    of_prefill = [i for i in instances if i.role != Role.DECODE.value]
    prefill = in_dispatch(Role.PREFILL) + in_dispatch(Role.COLOCATED)
    decode = in_dispatch(Role.DECODE)
    holding = sum(i.num_holding for i in instances)
    return {
        "prefill": prefill + sum(i.num_waiting for i in of_prefill),
        "decode": decode,
        # What waits for room is held on its prefill instance too.
        "transfer": max(holding - decode, 0),
    }
