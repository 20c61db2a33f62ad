from __future__ import annotations

import dask
import pytest

from daskserve.config import settings
from daskserve.core.instance import Role
from daskserve.core.placement import GPULocation, InstancePlacement, Parallelism, Placement
from daskserve.deploy.ranks import common_variables, ranks_by_node, worker_command
from daskserve.deploy.site import Site, Tls
from daskserve.errors import ConfigError


def test_every_rank_has_its_node_and_gpu_and_only_heads_carry_a_role(placement):
    nodes = ranks_by_node(placement, Site(), settings().service)
    assert {n: [(r.name, r.gpu, r.resources) for r in ranks] for n, ranks in nodes.items()} == {
        0: [("prefill-0", 0, "PREFILL=32"), ("prefill-0.1", 1, ""), ("decode-1", 2, "DECODE=32")],
        1: [("decode-1.1", 0, ""), ("decode-2", 3, "DECODE=64")],
    }
    assert [r.num_threads for r in nodes[1]] == [1, 64]


def test_the_variables_of_a_rank_are_the_settings_that_its_worker_reads(placement, monkeypatch):
    [_, rank] = ranks_by_node(placement, Site(), settings().service)[1]
    for name, value in {**common_variables(Site(margin_s=77)), **rank.variables}.items():
        monkeypatch.setenv(name, value)
    read = dask.config.collect_env()
    with dask.config.set(
        {"daskserve": dask.config.merge(dask.config.get("daskserve"), read["daskserve"])}
    ):
        place, drain = settings().rank, settings().drain
    assert (place.instance, place.number, place.node, place.gpu) == ("decode-2", 0, 1, 3)
    assert (drain.on_signals, drain.margin_s) == (True, 77)
    assert rank.variables["CUDA_VISIBLE_DEVICES"] == "3"
    assert read["distributed"]["scheduler"]["work_stealing"] is False
    assert read["distributed"]["nanny"]["preload"] == ["daskserve.service.nanny_preload"]


def test_a_cpu_worker_sees_no_gpu_and_keeps_to_its_cores(placement):
    site = Site(device="cpu", cpus_per_rank=2)
    rank = ranks_by_node(placement, site, settings().service)[0][0]
    assert "CUDA_VISIBLE_DEVICES" not in rank.variables
    words = worker_command(rank, site, ["tcp://a:8786"], range(2, 4))
    assert words[:5] == ["taskset", "-c", "2-3", "dask", "worker"]


def test_ucx_options_are_given_only_where_asked_for(placement):
    site = Site(protocol="ucx", infiniband=True, nvlink=False, rmm_pool="4GB")
    rank = ranks_by_node(placement, site, settings().service)[0][0]
    words = " ".join(worker_command(rank, site, ["ucx://a:8786"], None))
    assert "--protocol ucx --enable-infiniband --disable-nvlink --rmm-pool-size 4GB" in words
    tcp = " ".join(worker_command(rank, Site(infiniband=True), ["tcp://a:8786"], None))
    assert "infiniband" not in tcp and "protocol" not in tcp


def test_tls_is_required_of_all_connections():
    site = Site(protocol="tls", tls=Tls(ca_file="/c/ca.pem", cert="/c/c.pem", key="/c/k.pem"))
    variables = common_variables(site)
    assert variables["DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION"] == "True"
    assert variables["DASK_DISTRIBUTED__COMM__TLS__WORKER__KEY"] == "/c/k.pem"


def test_a_placement_that_no_service_can_use_is_refused():
    one = Parallelism(1, 1)
    roles = (Role.COLOCATED, Role.PREFILL, Role.DECODE)
    instances = tuple(
        InstancePlacement(role, one, (GPULocation(0, gpu),)) for gpu, role in enumerate(roles)
    )
    with pytest.raises(ConfigError, match="mixes COLOCATED"):
        ranks_by_node(Placement(instances, 8), Site(), settings().service)
