"""On somebody else's scheduler: nothing global changes, services share it, and it is left clean."""

from __future__ import annotations

import asyncio
import weakref

import dask
import pytest
from distributed import Client, LocalCluster

from daskserve import EngineConfig, SamplingParams, Service
from daskserve.core.instance import Role
from daskserve.errors import ClusterError, ModelError
from daskserve.service import instance_plugin, members
from daskserve.service.instance_plugin import InstancePlugin
from daskserve.service.names import DISPATCH_PLUGIN

PARAMS = SamplingParams(max_tokens=8)


def traits(client: Client) -> dict:
    """What is global on a scheduler."""

    def look(dask_scheduler) -> dict:
        amm = dask_scheduler.extensions.get("amm")
        return {
            "extensions": sorted(dask_scheduler.extensions),
            "plugins": sorted(dask_scheduler.plugins),
            "handlers": sorted(dask_scheduler.handlers),
            "worker_plugins": sorted(dask_scheduler.worker_plugins),
            "callbacks": sorted(dask_scheduler.periodic_callbacks),
            "amm": amm is not None and amm.running,
            "stealing": dask_scheduler.periodic_callbacks["stealing"].is_running(),
        }

    return client.run_on_scheduler(look)


def test_a_scheduler_is_left_as_it_was_found(cluster, mock):
    with cluster(prefill=1, decode=1) as own, Client(own) as client:
        before = traits(client)
        with Service.attach(client, mock()) as service:
            during = traits(client)
            service.submit("hello", PARAMS).result()
            assert client.submit(lambda x: x + 1, 1).result() == 2
        after = traits(client)
        for fact in ("extensions", "amm", "stealing"):
            assert before[fact] == during[fact] == after[fact]
        assert before == after
        with Service.attach(client, mock(mock_decode_s=0.001)) as service:
            service.submit("hello", PARAMS).result()


def test_a_closed_service_gives_the_memory_of_its_models_back(
    cluster, mock, monkeypatch, eventually
):
    built, build = [], instance_plugin._build

    def building(role, config, load):
        instance = build(role, config, load)
        built.append(weakref.ref(instance))
        return instance

    monkeypatch.setattr(instance_plugin, "_build", building)
    with cluster(prefill=1, decode=1) as own, Client(own) as client:
        with Service.attach(client, mock()) as service:
            service.submit("hello", PARAMS).result()
        eventually(lambda: [ref() for ref in built] == [None, None])


@pytest.mark.slow
def test_a_killed_driver_does_not_keep_the_workers(cluster, mock, monkeypatch, eventually):
    monkeypatch.setattr(members, "CLIENT_GRACE_S", 0.1)
    with cluster(prefill=1, decode=1) as own, Client(own) as client:
        before = traits(client)
        killed = Service.attach(own.scheduler_address, mock())
        killed.client.close()  # all that the scheduler sees of a kill
        eventually(lambda: traits(client) == before, timeout_s=10)
        with Service.attach(client, mock(block_size=32)) as service:
            assert service.submit("hello", PARAMS).result().num_output_tokens == 8


@pytest.mark.slow
def test_active_memory_manager_and_stealing_may_be_on(cluster, mock, is_idle, eventually):
    """AMM drops the prefill's copy of the handle while the KV waits; the KV must not go."""
    settings = {
        "distributed.scheduler.active-memory-manager.start": True,
        "distributed.scheduler.active-memory-manager.interval": "20ms",
        "distributed.scheduler.work-stealing-interval": "20ms",
    }
    config = mock(mock_decode_s=0.01, num_kv_blocks=40)
    with (
        dask.config.set(settings),
        cluster(prefill=2, decode=2, slots=4) as own,
        Client(own) as client,
        Service.attach(client, config) as service,
    ):
        completions = client.gather(service.map(["x" * 100] * 16, SamplingParams(max_tokens=16)))
        assert all(c.timeline.num_recomputes == 0 for c in completions)
        assert len({c.text for c in completions}) == 1
        eventually(lambda: is_idle(service))


@pytest.mark.slow
def test_two_services_share_instances_and_keep_apart(cluster, mock):
    with cluster(prefill=1, decode=2) as own, Client(own) as one, Client(own) as two:
        with Service.attach(one, mock()) as first, Service.attach(two, mock()) as second:
            mine = first.map([f"a{i}" for i in range(20)], PARAMS)
            theirs = second.map([f"a{i}" for i in range(20)], PARAMS)
            assert not {f.key for f in mine} & {f.key for f in theirs}
            texts = [c.text for c in one.gather(mine)]
            assert texts == [c.text for c in two.gather(theirs)]
            first.close()
            assert second.submit("a0", PARAMS).result().text == texts[0]


def test_another_config_on_the_same_workers_is_refused_with_both_values(cluster, mock):
    with (
        cluster(prefill=1, decode=1) as own,
        Client(own) as client,
        Service.attach(client, mock()),
    ):
        for change, part in (
            ({"block_size": 32}, "block_size=16 there, block_size=32 here"),
            ({"dtype": "float32"}, "dtype=bfloat16 there, dtype=float32 here"),
        ):
            with pytest.raises(ClusterError, match=f"another EngineConfig .{part}"):
                Service.attach(client, mock(**change))


@pytest.mark.parametrize("counts", [{}, {"prefill": 1}, {"decode": 1}])
def test_missing_roles_are_named_at_once(cluster, mock, counts):
    with (
        cluster(**counts) as own,
        Client(own) as client,
        pytest.raises(ClusterError, match="PREFILL and DECODE, or COLOCATED"),
    ):
        Service.attach(client, mock())


def test_a_worker_with_less_than_one_slot_has_no_role(cluster, mock):
    with (
        cluster(prefill=1, decode=1, slots=0) as own,
        Client(own) as client,
        pytest.raises(ClusterError, match="found: none"),
    ):
        Service.attach(client, mock())


def test_a_worker_that_cannot_set_up_is_an_error_of_attach(cluster, mock, monkeypatch):
    async def setup(self, worker) -> None:
        raise AttributeError("of another version")

    monkeypatch.setattr(InstancePlugin, "setup", setup)
    with (
        cluster(prefill=1, decode=1) as own,
        Client(own) as client,
        pytest.raises(ClusterError, match="of another version.*install the same version"),
    ):
        Service.attach(client, mock())


def test_a_clock_that_cannot_be_read_at_once_is_asked_again(cluster, mock, monkeypatch):
    asked = []

    async def flaky(read_remote) -> float:
        asked.append(await read_remote())
        if len(asked) == 1:
            raise TimeoutError("the scheduler is busy")
        return 0.0

    monkeypatch.setattr(instance_plugin, "clock_offset_s", flaky)
    monkeypatch.setattr(instance_plugin, "_CLOCK_RETRY_S", 0.01)
    with (
        cluster(colocated=1) as own,
        Client(own) as client,
        Service.attach(client, mock()) as service,
    ):
        assert service.submit("hello", PARAMS).result().num_output_tokens == 8
    assert len(asked) == 2


@pytest.mark.slow
def test_a_worker_that_joins_and_cannot_set_up_is_named(cluster, mock):
    """Its role is there, but no report of an instance comes."""
    with (
        dask.config.set({"daskserve.service.no-instance-timeout-s": 0.5}),
        cluster(prefill=1, decode=1) as own,
        Client(own) as client,
        Service.attach(client, mock()) as service,
    ):
        [address] = [i.address for i in service.info() if i.role is Role.PREFILL]

        def forget(dask_scheduler) -> None:
            dask_scheduler.plugins[DISPATCH_PLUGIN].lose(address, reason=None)

        client.run_on_scheduler(forget)
        with pytest.raises(ClusterError, match=f"{address} should run one; see its log"):
            service.submit("hello", PARAMS).result(timeout=10)


@pytest.fixture
def clients(monkeypatch) -> list[Client]:
    """Every client that is made."""
    made: list[Client] = []
    init = Client.__init__

    def remembering(self, *args, **kwargs) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(Client, "__init__", remembering)
    return made


NOWHERE = pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense"])
SOON = {"distributed.comm.timeouts.connect": "200ms"}


@NOWHERE
def test_no_scheduler_at_the_address(address, clients):
    with dask.config.set(SOON), pytest.raises(ClusterError, match="no Dask scheduler"):
        Service.attach(address, EngineConfig(model="mock"))
    assert [client.status for client in clients] == ["closed"]


@NOWHERE
async def test_no_scheduler_at_the_address_in_asynchronous_code(address, clients):
    with dask.config.set(SOON), pytest.raises(ClusterError, match="no Dask scheduler"):
        await Service.attach(address, EngineConfig(model="mock"), asynchronous=True)
    assert [client.status for client in clients] == ["closed"]


def test_a_closed_service_says_so(cluster, mock):
    with cluster(colocated=1) as own:
        client = Client(own)
        service = Service.attach(client, mock())
        service.close()
        service.close()
        for call in (service.status, service.info, service.load):
            with pytest.raises(ClusterError, match="the service is closed"):
                call()
        for ask in (service.submit, service.stream):
            with pytest.raises(ClusterError, match="the service is closed"):
                ask("hello", PARAMS)
        client.close()
        with pytest.raises(ClusterError, match="the Dask client is closed"):
            Service.attach(client, mock())


def test_a_model_that_is_not_there_fails_at_once(cluster):
    with cluster(colocated=1) as own, Client(own) as client:
        with pytest.raises(ModelError, match="/no/such/model"):
            Service.attach(client, EngineConfig(model="/no/such/model"))


def test_a_model_that_only_the_workers_lack_fails_at_once(cluster, mock):
    """More KV blocks than memory: the client cannot know, the instances report it."""
    config = mock(kv_memory_bytes=1)
    with cluster(prefill=1, decode=1) as own, Client(own) as client:
        with pytest.raises(ModelError, match="kv_memory_bytes=1"):
            Service.attach(client, config)


@pytest.mark.slow
def test_from_asynchronous_code(cluster, mock):
    async def main(address: str) -> None:
        async with (
            Client(address, asynchronous=True) as client,
            Service.attach(client, mock()) as service,
        ):
            completion = await service.submit("hello", PARAMS)
            deltas = [delta async for delta in service.stream("hello", PARAMS)]
            assert "".join(d.text for d in deltas) == completion.text
            assert len(await service.info()) == 2

    with cluster(prefill=1, decode=1) as own:
        asyncio.run(main(own.scheduler_address))


def test_a_default_local_cluster_of_dask_lacks_roles(mock):
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=None, silence_logs=50) as own,
        Client(own) as client,
        pytest.raises(ClusterError, match="found: none"),
    ):
        Service.attach(client, mock())
