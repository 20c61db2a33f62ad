import math
import pickle

import pytest

from daskserve.core.params import SamplingParams
from daskserve.errors import InvalidParameter


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 10**7),
        ("max_tokens", 1.5),
        ("max_tokens", "7"),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 2**63),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", ("x" * 257,)),
        ("stop", ("x",) * 17),
        ("stop", ("\ud800",)),
        ("stop", 5),
        ("ignore_eos", 1),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}=")


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END").stop == ("END",)


def test_the_error_survives_a_process_boundary():
    error = pickle.loads(pickle.dumps(InvalidParameter("top_p", 2.0, "must be 0..1")))
    assert (error.field, error.value, str(error)) == ("top_p", 2.0, "top_p=2.0 must be 0..1")
