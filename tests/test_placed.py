from __future__ import annotations

import pytest
from click.testing import CliRunner

from daskserve import EngineConfig
from daskserve.cli import main
from daskserve.core.instance import Role
from daskserve.core.placement import GPULocation, InstancePlacement, Parallelism, Placement
from daskserve.errors import ConfigError
from daskserve.placed import engines_of, shapes_of
from daskserve.planner.placement_file import placement_to_yaml


def one(role, gpu, node=0, tp=1, **limits):
    gpus = tuple(GPULocation(node, gpu + rank) for rank in range(tp))
    return InstancePlacement(role, Parallelism(tp, 1), gpus, **limits)


def test_a_placement_becomes_instances_with_its_limits():
    placement = Placement(
        (
            one(Role.PREFILL, 0, kv_capacity_tokens=4000, prefill_budget_tokens=512),
            one(Role.PREFILL, 1, kv_capacity_tokens=5000, prefill_budget_tokens=512),
            one(Role.DECODE, 2, kv_capacity_tokens=9000, max_batch_size=48),
        ),
        gpus_per_node=8,
    )
    one_worker = Parallelism(1, 1)
    assert shapes_of(placement) == {
        "prefill": [one_worker, one_worker],
        "decode": [one_worker],
        "colocated": [],
    }
    engines = engines_of(placement, EngineConfig(model="mock"))
    assert list(engines) == ["prefill-0", "prefill-1", "decode-2"]
    assert [e.num_kv_blocks for e in engines.values()] == [250, 312, 562]
    assert [e.prefill_budget_tokens for e in engines.values()] == [512, 512, None]
    assert [e.max_batch_size for e in engines.values()] == [64, 64, 48]
    assert {e.model for e in engines.values()} == {"mock"}


def test_instances_of_one_role_may_have_unlike_limits():
    placement = Placement(
        (one(Role.COLOCATED, 0, max_batch_size=8), one(Role.COLOCATED, 1, max_batch_size=9)),
        gpus_per_node=8,
    )
    engines = engines_of(placement, EngineConfig(model="mock"))
    assert [e.max_batch_size for e in engines.values()] == [8, 9]


def test_a_batch_has_a_micro_batch_for_every_stage():
    gpus = tuple(GPULocation(0, gpu) for gpu in range(6))
    decode = InstancePlacement(Role.DECODE, Parallelism(2, 3), gpus, max_batch_size=16)
    placement = Placement((one(Role.PREFILL, 6), decode), gpus_per_node=8)
    assert shapes_of(placement)["decode"] == [Parallelism(2, 3)]
    engines = engines_of(placement, EngineConfig(model="mock"))
    assert engines["decode-1"].max_batch_size == 48


def test_colocated_instances_keep_their_chunks():
    placement = Placement((one(Role.COLOCATED, 0, chunk_tokens=256),), gpus_per_node=1)
    assert shapes_of(placement)["colocated"] == [Parallelism(1, 1)]
    assert engines_of(placement, EngineConfig(model="mock"))["colocated-0"].chunk_tokens == 256


@pytest.mark.parametrize(
    ("instances", "part"),
    [
        ((one(Role.COLOCATED, 0), one(Role.COLOCATED, 0, node=1)), "spans 2 nodes"),
        (
            (one(Role.COLOCATED, 0), one(Role.PREFILL, 1), one(Role.DECODE, 2)),
            "mixes COLOCATED with",
        ),
    ],
)
def test_what_cannot_be_started_here_is_refused(instances, part):
    placement = Placement(instances, gpus_per_node=8)
    with pytest.raises(ConfigError) as caught:
        shapes_of(placement)
    assert part in str(caught.value)


def test_the_command_line_reads_it(tmp_path):
    path = tmp_path / "placement.yaml"
    far = (one(Role.COLOCATED, 0, tp=2), one(Role.COLOCATED, 0, node=1))
    path.write_text(placement_to_yaml(Placement(far, gpus_per_node=8)))
    for options, part in (
        (["--placement", str(path)], "spans 2 nodes"),
        (["--placement", "none.yaml"], "cannot read none.yaml"),
        (["--placement", str(path), "--decode", "2"], "leave out --decode"),
    ):
        result = CliRunner().invoke(main, ["serve", "--model", "mock", *options])
        assert (result.exit_code, part in result.stderr) == (1, True)
