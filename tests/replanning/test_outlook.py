"""What the planner expects of splits."""

from __future__ import annotations

from dataclasses import replace

from daskserve.core.instance import EngineConfig
from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.planner.latency.mock import mock_step_times
from daskserve.planner.workload import Workload
from daskserve.replanning.outlook import Outlook
from daskserve.replanning.split import Split

CONFIG = EngineConfig(model="mock", mock_prefill_s=0.02, mock_decode_s=0.02)


def test_instances_that_slow_each_other_down_are_expected_to_do_less():
    history = Workload.from_arrays([0.1 * n for n in range(60)], [200] * 60, [20] * 60)
    times = {Parallelism(): mock_step_times(CONFIG, 65_536, 512)}
    alone = Outlook(times, SLO(0.2, 0.03))
    beside = replace(alone, prefill_slowdown=0.2, decode_slowdown=0.4)
    split = Split(2, 2)
    apart, together = (one.predict(history, [split], 1.0)[0] for one in (alone, beside))
    assert 0 < together.goodput_rps < 0.9 * apart.goodput_rps
