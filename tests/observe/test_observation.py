"""Recordings: what was seen comes back, half a line waits, another file is refused."""

from __future__ import annotations

import pytest

from daskserve.core.slo import SLO
from daskserve.errors import ConfigError
from daskserve.observe import InstanceSample, JobProgress, Observation, Percentiles, Sample
from daskserve.observe.observation import Recorder, RecordingReader

ROW = Sample(
    1e9, 15.0, "mock", SLO(0.2, 0.1), 3.0, ttft_s=Percentiles(0.1, 0.2, 0.3), waiting={"decode": 2},
    instances=(InstanceSample("decode-0", "tcp://a:1", "DECODE", "ready"),),
)  # fmt: skip
SEEN = Observation(ROW, (JobProgress("1", "out.jsonl", 10),), ({"decision_id": 1},))


def test_what_is_recorded_comes_back_also_while_it_grows(tmp_path):
    path = tmp_path / "day.jsonl"
    recorder = Recorder(path)
    with RecordingReader(path) as reader:
        assert list(reader.new()) == []
        recorder.add(SEEN)
        recorder.add(Observation(ROW))
        assert list(reader.new()) == [SEEN, Observation(ROW)]
        assert list(reader.new()) == []
        recorder.add(SEEN)
        recorder.close()
        assert list(reader.new()) == [SEEN]
    assert path.stat().st_mode & 0o777 == 0o600


def test_half_a_line_waits_for_its_end(tmp_path):
    path = tmp_path / "day.jsonl"
    recorder = Recorder(path)
    recorder.add(SEEN)
    recorder.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with RecordingReader(path) as reader:
        assert list(reader.new()) == []
        with path.open("ab") as file:
            file.write(whole[-20:])
        assert list(reader.new()) == [SEEN]


@pytest.mark.parametrize("content", [b"", b"{}\n", b"not json\n", b'{"recording": "daskserve"}\n'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "other.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no recording"):
        RecordingReader(path)


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "day.jsonl"
    Recorder(path).close()
    with path.open("ab") as file:
        file.write(b'{"sample": {}}\n')
    with RecordingReader(path) as reader, pytest.raises(ConfigError, match="line 2 is no"):
        list(reader.new())
