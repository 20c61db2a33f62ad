import numpy as np
import pytest
from click.testing import CliRunner

from daskserve import EngineConfig, SamplingParams, Service
from daskserve.cli import main
from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.errors import InvalidParameter
from daskserve.observe.observation import RecordingReader
from daskserve.planner.latency.mock import mock_step_times
from daskserve.planner.workload import Workload
from daskserve.replanning.decision import Trigger
from daskserve.replanning.outlook import Outlook
from daskserve.replanning.record import read_journal
from daskserve.replanning.split import Split
from daskserve.replay.days import CODE, CONVERSATION, compressed, joined, stretch, two_mixes
from daskserve.replay.in_simulator import best_static, play_replanned

CONFIG = EngineConfig(model="mock", mock_prefill_s=0.4, mock_decode_s=0.1, max_batch_size=8)
OUTLOOK = Outlook({Parallelism(): mock_step_times(CONFIG, 65_536, 512)}, SLO(2.0, 0.15))


def step(seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    before = stretch(CODE, 6.0, 0.0, 120.0, rng)
    return joined([before, stretch(CONVERSATION, 5.0, 120.0, 150.0, rng)])


def test_a_step_of_the_mix_is_answered_within_a_minute_and_goodput_restored():
    workload = step(0)
    day = play_replanned(workload, OUTLOOK, Split(4, 2))
    change = day.changes[0]
    assert change.trigger in (Trigger.DRIFT, Trigger.QUEUE)
    assert 120 < change.at_unix_s <= 180
    arrival_s, prompt, output = workload.arrays()
    late = arrival_s >= 120
    after = Workload.from_arrays(arrival_s[late] - 120, prompt[late], output[late])
    best = best_static(after, OUTLOOK, 6)
    assert day.goodput_rps(190) >= 0.9 * best.goodput_rps(70)


@pytest.mark.slow
def test_replanning_beats_the_best_static_split_of_a_day_of_two_mixes():
    workload = two_mixes((8.0, 6.0), 150.0, 4, seed=0)
    day = play_replanned(workload, OUTLOOK, Split(3, 3))
    assert day.goodput_rps() >= 1.1 * best_static(workload, OUTLOOK, 6).goodput_rps()


def test_the_same_day_gives_the_same_decisions():
    first, second = (play_replanned(step(1), OUTLOOK, Split(4, 2)) for _ in range(2))
    assert [d.to_json() for d in first.decisions] == [d.to_json() for d in second.decisions]
    assert np.array_equal(first.met, second.met)


def test_a_day_is_compressed_and_thinned():
    day = two_mixes((1.0, 1.0), 600.0, 2, seed=0)
    faster = compressed(day, 10.0, None, 0)
    assert len(faster) == len(day)
    assert faster.rate == pytest.approx(10 * day.rate)
    thinned = compressed(day, 10.0, 5.0, 0)
    assert thinned.rate == pytest.approx(5.0, rel=0.15)
    with pytest.raises(InvalidParameter, match="at most"):
        compressed(day, 10.0, 50.0, 0)
    with pytest.raises(InvalidParameter, match="speed"):
        compressed(day, 0.0, None, 0)


def test_the_command_plays_a_day_and_writes_what_dashboards_read(tmp_path):
    record, decisions = tmp_path / "day.jsonl", tmp_path / "decisions.jsonl"
    arguments = ["replay", "two-mixes", "--speed", "200", "--max-batch-size", "8"]
    limits = ["--slo-ttft", "2", "--slo-tpot", "0.15"]
    files = ["--record", str(record), "--decisions", str(decisions)]
    result = CliRunner().invoke(main, [*arguments, *limits, *files])
    assert result.exit_code == 0, result.output
    assert "replanning serves" in result.output and "0 failed requests" in result.output
    with RecordingReader(record) as reader:
        rows = list(reader.new())
    written = read_journal(decisions)
    assert [d["decision_id"] for row in rows for d in row.decisions] == [
        d.decision_id for d in written
    ]
    assert written
    without = CliRunner().invoke(main, arguments)
    assert without.exit_code == 1 and "--slo-ttft" in without.output


@pytest.mark.slow
async def test_a_real_service_answers_a_step_of_the_mix():
    from daskserve.replay.against_service import play
    from daskserve.service.replan_options import ReplanOptions

    config = EngineConfig(model="mock", mock_prefill_s=0.4, mock_decode_s=0.1, max_batch_size=8)
    async with Service.local(
        prefill=4,
        decode=2,
        config=config,
        slo=OUTLOOK.slo,
        cores=None,
        flippable=True,
        asynchronous=True,
    ) as service:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        await service.stream("hello", params).completion()
        await service.replan(ReplanOptions())
        day = await play(service, step(0), OUTLOOK.slo, "replanning")
        roles = [instance.role for instance in await service.info()]
    assert day.num_failed == 0 and roles.count(Role.DECODE) > 2
    assert day.changes and all(d.outcome.pause_s <= 2 for d in day.changes)
