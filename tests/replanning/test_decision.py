import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.errors import ConfigError, InvalidParameter
from daskserve.replanning.decision import (
    Action,
    Decision,
    Evidence,
    Kind,
    Outcome,
    Prediction,
    Status,
    Trigger,
)
from daskserve.replanning.record import Journal, read_journal
from daskserve.replanning.split import Split

number = st.floats(0, 1e6)
splits = st.builds(
    Split, st.integers(1, 9), st.integers(1, 9), st.builds(Parallelism, st.integers(1, 4))
)
predictions = st.none() | st.builds(Prediction, splits, number, st.none() | number)
decisions = st.builds(
    Decision,
    decision_id=st.integers(1, 5),
    at_unix_s=number,
    trigger=st.sampled_from(Trigger),
    reason=st.text(),
    evidence=st.lists(
        st.builds(Evidence, st.text(), number, number, number, number), max_size=2
    ).map(tuple),
    actions=st.lists(
        st.builds(Action, st.sampled_from(Kind), st.sampled_from(Role), st.text()), max_size=2
    ).map(tuple),
    before=predictions,
    after=predictions,
    outcome=st.none() | st.builds(Outcome, st.sampled_from(Status), st.text(), number, number),
)


@given(decisions)
def test_a_decision_survives_json(decision):
    text = json.dumps(decision.to_json(), allow_nan=False)
    assert Decision.from_json(json.loads(text)) == decision


def test_a_journal_tells_the_last_word_of_each_decision_and_goes_on_counting(tmp_path):
    path = tmp_path / "decisions.jsonl"
    journal = Journal(path)
    first = Decision(journal.take_id(), 1.0, Trigger.DRIFT, "no change, because it is best")
    second = Decision(journal.take_id(), 2.0, Trigger.MANUAL, "asked for")
    journal.write(first)
    journal.write(second)
    second = second.with_outcome(Outcome(Status.DONE, took_s=1.0))
    journal.write(second)
    assert read_journal(path) == [first, second] == journal.decisions
    assert path.stat().st_mode & 0o077 == 0
    with path.open("a") as file:
        file.write('{"decision_id": 3, "at_un')  # a writer at work
    assert read_journal(path) == [first, second]
    assert Journal(path).take_id() == 3


def test_a_line_that_is_no_decision_is_named(tmp_path):
    path = tmp_path / "decisions.jsonl"
    path.write_text('{"decision_id": 3}\n')
    with pytest.raises(ConfigError, match="line 1 is no decision"):
        read_journal(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_journal(tmp_path / "nothing")


@given(splits)
def test_a_split_survives_its_text(split):
    assert Split.parse(str(split)) == split


def test_splits_that_leave_a_role_empty_are_refused():
    with pytest.raises(InvalidParameter, match="num_decode=0"):
        Split(3, 0)
    with pytest.raises(InvalidParameter, match="split"):
        Split.parse("3 prefill")
    assert [str(split) for split in Split(2, 2).same_size()] == ["1P3D", "2P2D", "3P1D"]
