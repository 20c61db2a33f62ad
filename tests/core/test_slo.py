import math

import pytest

from daskserve.core.request import Completion, FinishReason, Timeline
from daskserve.core.slo import SLO
from daskserve.errors import InvalidParameter


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "fast", True])
def test_a_limit_must_be_a_finite_time(value):
    with pytest.raises(InvalidParameter):
        SLO(ttft_s=value, tpot_s=0.1)


def test_both_limits_count_together():
    slo = SLO(ttft_s=1.0, tpot_s=0.1)
    assert slo.attained([(0.5, 0.05), (2.0, 0.05), (0.5, 0.2), (0.5, None)]) == 0.5


def test_no_requests_is_no_data():
    assert SLO(ttft_s=1.0, tpot_s=0.1).attained([]) is None


def test_transfer_and_decode_queue_fall_into_tpot_not_ttft():
    timeline = Timeline(0.1, 0.2, 0.3, 0.4, 1.3)
    answer = Completion("r", "", (1, 2, 3), FinishReason.LENGTH, 4, timeline)
    assert answer.ttft_s == pytest.approx(0.3)
    assert answer.tpot_s == pytest.approx(1.0)


def test_one_token_has_no_tpot():
    assert Completion("r", "", (1,), FinishReason.LENGTH, 4, Timeline()).tpot_s is None
