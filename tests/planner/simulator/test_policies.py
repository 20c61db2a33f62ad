"""The simulator runs the engine's own decisions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.planner.simulator.compiled import compiling, policies
from daskserve.scheduling import batching, routing


@pytest.mark.parametrize("module", [batching, routing])
def test_every_policy_is_the_engine_s_function_object(module):
    functions = [
        f for f in vars(module).values() if getattr(f, "__module__", "") == module.__name__
    ]
    assert functions
    for function in functions:
        assert getattr(policies, function.__name__).py_func is function


@given(
    st.lists(st.integers(1, 3000), max_size=30), st.integers(1, 2048), st.integers(0, 400),
    st.integers(1, 12),
)  # fmt: skip
def test_what_is_not_shown_to_the_batching_policy_could_not_be_taken(lengths, budget, free, most):
    shown, total = [], 0
    for length in lengths[:most]:
        shown.append(length)
        total += length
        if total > budget:
            break
    arguments = (budget, free, 16, most)
    assert batching.prefill_batch_size(shown, *arguments) == batching.prefill_batch_size(
        lengths, *arguments
    )


def test_an_edited_policy_is_compiled_anew(monkeypatch, tmp_path):
    before = compiling.source_digest()
    edited = tmp_path / "batching.py"
    edited.write_bytes(Path(batching.__file__).read_bytes() + b"\n# edited\n")
    monkeypatch.setattr(batching, "__file__", str(edited))
    assert compiling.source_digest() != before
