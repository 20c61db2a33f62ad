import numpy as np
import pytest

from daskserve.core.instance import EngineConfig, Role
from daskserve.errors import ConfigError
from daskserve.planner.latency.mock import mock_step_times
from daskserve.planner.simulator import Deployment
from daskserve.planner.simulator.driving import run_arrays
from daskserve.planner.simulator.flipping import FlippingSimulation
from daskserve.planner.workload import Workload

CONFIG = EngineConfig(model="mock", mock_prefill_s=0.1, mock_decode_s=0.05, max_batch_size=4)
TIMES = mock_step_times(CONFIG, 100_000, 512)
P, D = Role.PREFILL, Role.DECODE


def pieces(workload: Workload, seconds: float):
    arrival_s, *lengths = workload.arrays()
    ends = np.arange(seconds, arrival_s[-1] + 2 * seconds, seconds)
    for part in np.split(np.arange(len(arrival_s)), np.searchsorted(arrival_s, ends)):
        yield arrival_s[part], *(each[part] for each in lengths)


def run(simulation: FlippingSimulation, workload: Workload, at=lambda tick: None) -> np.ndarray:
    rows = []
    for tick, piece in enumerate(pieces(workload, 1.0)):
        rows.append(simulation.advance(*piece))
        at(tick)
    rows.append(simulation.finish())
    done = np.concatenate(rows)
    return done[np.argsort(done["request_id"])]


def test_without_flips_it_is_the_plain_simulator():
    workload = Workload.uniform(400, 5.0, 300, 20)
    plain, _ = run_arrays(
        Deployment(prefill=TIMES, num_prefill=2, decode=TIMES, num_decode=1), *workload.arrays()
    )
    done = run(FlippingSimulation(TIMES, [P, P, D]), workload)
    for name in ("prefill_queue_s", "prefill_s", "decode_queue_s", "decode_s", "output_tokens"):
        assert np.array_equal(done[name], plain[name]), name


def test_flips_lose_nothing_and_a_drained_instance_gets_nothing():
    workload = Workload.uniform(600, 4.0, 300, 20)
    simulation = FlippingSimulation(TIMES, [P, P, D, D])
    closed: list[tuple[int, int]] = []

    def change(tick: int) -> None:
        number = tick // 20
        index, role = (1, D) if number % 2 == 0 else (1, P)
        if tick % 20 == 10:
            simulation.drain(index)
        elif not simulation.is_open(index):
            closed.append((tick, simulation.num_running(index)))
            if simulation.is_drained(index):
                simulation.resume(index, role)

    done = run(simulation, workload, change)
    assert len(done) == 600 and (done["output_tokens"] == 20).all()
    assert (np.sort(done["request_id"]) == np.arange(600)).all()
    assert any(num_running == 0 for _, num_running in closed)
    assert {1, 0} <= set(done["prefill_instance"]) and {1, 2, 3} <= set(done["decode_instance"])


def test_more_of_the_role_that_is_short_helps():
    workload = Workload.uniform(300, 5.0, 100, 60)
    short = run(FlippingSimulation(TIMES, [P, P, D, D]), workload)
    flipped = FlippingSimulation(TIMES, [P, P, D, D])

    def change(tick: int) -> None:
        if tick == 10:
            flipped.drain(0)
        elif not flipped.is_open(0) and flipped.is_drained(0):
            flipped.resume(0, D)

    helped = run(flipped, workload, change)
    assert helped["decode_queue_s"].mean() < 0.8 * short["decode_queue_s"].mean()


def test_both_roles_are_needed():
    with pytest.raises(ConfigError, match="both"):
        FlippingSimulation(TIMES, [P, P])
