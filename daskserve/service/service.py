"""The front door: prompts in, ordinary Dask futures of completions out."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import dask
from distributed import Client, Future, SpecCluster

from daskserve.config import settings
from daskserve.core.instance import EngineConfig, Role
from daskserve.core.params import SamplingParams
from daskserve.core.request import Request
from daskserve.core.slo import SLO
from daskserve.errors import ConfigError
from daskserve.service.cards import on_device, placed_on
from daskserve.service.connection import Connection
from daskserve.service.control import InstanceControl
from daskserve.service.figures import ServiceFigures
from daskserve.service.graph import submit_graph
from daskserve.service.joining import Expected, reach, reach_async
from daskserve.service.local import Cores, Instances, local_cluster, own_cluster_config, shapes_of
from daskserve.service.online import OnlineRequests
from daskserve.service.requests import Prompt, RequestMaker
from daskserve.service.token_stream import TokenListener, TokenStream, own_host
from daskserve.text.tokenizer import Tokenizer

_MAP_CHUNK = 500  # requests per graph


class Service(InstanceControl, ServiceFigures):
    """LLM inference on a Dask cluster; made by `local` or `attach`.

    A context manager, in synchronous and asynchronous code: with ``asynchronous=True`` (or an
    asynchronous client) await the service, or use ``async with``, before anything else.
    """

    def __init__(
        self,
        config: EngineConfig,
        slo: SLO | None,
        client: Client | str | None,
        own: dict[str, Any] | None,
        asynchronous: bool,
        expected: Expected | None = None,
    ) -> None:
        self.config = config
        self._expected = expected or Expected()
        self.slo = slo
        self._settings = settings().service
        self.client: Client | None = client if isinstance(client, Client) else None
        self._given = client
        self._own = own
        self._asynchronous = asynchronous
        self._cluster: SpecCluster | None = None
        self._connection: Connection | None = None
        self._listener: TokenListener | None = None
        self._online: OnlineRequests | None = None
        self._futures = weakref.WeakKeyDictionary[Future, Future | None]()

    @classmethod
    def local(
        cls,
        prefill: Instances = 1,
        decode: Instances = 1,
        colocated: Instances = 0,
        config: EngineConfig | None = None,
        *,
        device: str | None = None,
        cores: Cores = "auto",
        flippable: bool = False,
        protocol: str | None = None,
        slo: SLO | None = None,
        asynchronous: bool = False,
        configs: Mapping[str, EngineConfig] | None = None,
    ) -> Service:
        """Start a cluster of our own on this machine, on loopback only.

        Parameters
        ----------
        prefill, decode, colocated
            Instances of each role, one process each; or their shapes, one process per rank:
            ``prefill=[Parallelism(tp=2)]``. Colocated ones serve alone, with both others 0.
        config
            Engine of every instance.
        device
            Instead of that in ``config``. On CUDA instances share GPUs if they are too few.
        cores
            ``"auto"`` shares them out, a list of lists gives each rank its own, None binds none.
        flippable
            Prefill and decode instances can take each other's role, see `flip`.
        protocol
            Of Dask's connections, KV among them: ``tcp`` or ``ucx``; None: ``service.protocol``.
        slo
            Limits that batches are measured against.
        asynchronous
            For use inside an event loop.
        configs
            Engines of single instances by name, where they differ in limits. Instances are
            numbered through, prefill first: ``prefill-0``, ``decode-1``.

        Raises
        ------
        ConfigError, ModelError, ClusterError
            Wrong numbers or cores; the model cannot be loaded; instances do not start.
        """
        counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.COLOCATED: colocated}
        config, cards = on_device(config or EngineConfig(), device, shapes_of(counts), protocol)
        own = {"instances": counts, "cores": cores, "is_flippable": flippable, "cards": cards}
        own["protocol"] = cards.protocol if cards else protocol
        expected = Expected(configs=placed_on(cards, configs or {}))
        return cls(config, slo, None, own, asynchronous, expected)._opened()

    @classmethod
    def attach(
        cls,
        client: Client | str,
        config: EngineConfig | None = None,
        *,
        slo: SLO | None = None,
        asynchronous: bool = False,
        expected: Expected | None = None,
    ) -> Service:
        """Use a scheduler that exists, with workers started with role resources.

        Nothing global changes on it; when the last service closes, its instances go too.

        Parameters
        ----------
        client
            A client (its mode, synchronous or not, becomes ours), a scheduler's address, or a
            scheduler file.
        config
            Engine of every instance; the same for all services on a scheduler.
        slo, asynchronous
            As for `local`.
        expected
            A placement that must be there, its engines, and who hears what is waited for.

        Raises
        ------
        ModelError, ClusterError
            The model cannot be loaded; the cluster is not what the placement says, or lacks roles.
        """
        if isinstance(client, Client):
            asynchronous = client.asynchronous
        return cls(config or EngineConfig(), slo, client, None, asynchronous, expected)._opened()

    # Requests.

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model that runs; for services that are open."""
        return self._maker.tokenizer

    def validate(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Tokenize and check a prompt (RequestError): the request that `submit` would send."""
        is_colocated = self._connection.is_colocated
        roles = (Role.COLOCATED,) if is_colocated else (Role.PREFILL, Role.DECODE)
        instances = [i.info for i in self._connection.instances if i.info.role in roles]
        return self._maker.make(prompt, params or SamplingParams(), instances)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Future:
        """A future of the `Completion`; its key is ``decode-<request id>`` (RequestError)."""
        return self.submit_requests([self.validate(prompt, params)])[0]

    def map(self, prompts: Iterable[Prompt], params: SamplingParams | None = None) -> list[Future]:
        """Futures for many prompts; a wrong prompt raises before any is sent (RequestError).

        All of them are in flight at once: for long files use `daskserve.run_batch`, whose
        window bounds memory.
        """
        return self.submit_requests([self.validate(prompt, params) for prompt in prompts])

    def submit_requests(self, requests: Sequence[Request]) -> list[Future]:
        """Send validated requests, in order, in as few messages as is sensible."""
        self._connection.check()
        offset_s = self._connection.clock_offset_s
        if offset_s:
            requests = [replace(r, submitted_at=r.submitted_at + offset_s) for r in requests]
        is_colocated = self._connection.is_colocated
        futures: list[Future] = []
        for start in range(0, len(requests), _MAP_CHUNK):
            chunk = requests[start : start + _MAP_CHUNK]
            for future, prefill in submit_graph(self.client, chunk, is_colocated):
                self._futures[future] = prefill
                futures.append(future)
        return futures

    def prefill_future(self, future: Future) -> Future:
        """The ``prefill-<request id>`` future that belongs to a future of this service."""
        prefill = self._futures.get(future)
        if prefill is None:
            raise ConfigError(f"{future.key} has no prefill of its own here")
        return prefill

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> TokenStream:
        """Tokens as they are made, straight from the instances (RequestError).

        Iterate with ``async for`` or ``for``; dropping the stream cancels the request.
        """
        return self.stream_request(self.validate(prompt, params))

    def stream_request(
        self, request: Request, *, timeout_s: float | None = None, max_queue: int | None = None
    ) -> TokenStream:
        """Tokens of a validated request; `TokenStream.completion` has the whole answer.

        What goes wrong later is raised by the stream, after the tokens that did come.

        Parameters
        ----------
        timeout_s
            Seconds until the last token: after that the request is aborted and the stream
            raises DeadlineExceeded.
        max_queue
            Most requests that may wait before this one, below the setting
            ``service.max-waiting-requests``: with more, the stream raises Overloaded.
        """
        self._connection.check()
        request = replace(
            request,
            token_sink=self._listener.address(),
            submitted_at=request.submitted_at + self._connection.clock_offset_s,
        )
        return self._online.start(request, timeout_s, max_queue)

    def close(self) -> Any:
        """Cancel what is in flight and leave; an own cluster stops."""
        if self._asynchronous:
            return self._close()
        client = self.client
        try:
            if client is not None and client.status != "closed":
                client.sync(self._leave)
                if client is not self._given:
                    client.close()
        finally:
            if self._cluster is not None:
                self._cluster.close()
        return None

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __await__(self) -> Generator[Any, None, Service]:
        return self._open().__await__()

    async def __aenter__(self) -> Service:
        return await self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._close()

    def __repr__(self) -> str:
        return f"<Service {self.config.model} on {self.client!r}>"

    # Opening and closing.

    def _opened(self) -> Service:
        if self._asynchronous:
            return self
        try:
            self._maker = RequestMaker.of(self.config)
            if self._own is not None:
                with dask.config.set(own_cluster_config(self._settings.dashboard_address)):
                    self._cluster = self._new_cluster()
            if self.client is None:
                self.client = reach(self._cluster or self._given, self._expected.say)
            self.client.sync(self._join)
        except BaseException:
            self.close()
            raise
        return self

    async def _open(self) -> Service:
        if self._connection is not None:
            return self
        try:
            self._maker = await asyncio.to_thread(RequestMaker.of, self.config)
            if self._own is not None:
                with dask.config.set(own_cluster_config(self._settings.dashboard_address)):
                    self._cluster = await self._new_cluster()
            if self.client is None:
                where = self._cluster or self._given
                self.client = await reach_async(where, self._expected.say)
            await self._join()
        except BaseException:
            await self._close()
            raise
        return self

    def _new_cluster(self) -> SpecCluster:
        protocol = self._own["protocol"] or self._settings.protocol
        return local_cluster(
            self._own["instances"],
            self.config,
            self._settings.model_copy(update={"protocol": protocol}),
            self._own["cores"],
            self._own["is_flippable"],
            asynchronous=self._asynchronous,
            configs=self._expected.configs,
            cards=self._own["cards"],
        )

    async def _join(self) -> None:
        self._connection = Connection(
            self.client, self.config, self._settings, self.slo, self._expected
        )
        await self._connection.open()
        self._listener = TokenListener(
            self.client.loop,
            own_host(self.client.scheduler_comm.comm),
            self.client.security.get_listen_args("client").get("ssl_context"),
        )
        self._online = OnlineRequests(
            self.client, self._listener, self._settings, self._connection.is_colocated
        )

    async def _leave(self) -> None:
        await self._stop_replanning()
        undone = [future for future in self._futures if not future.done()]
        if undone and self.client.status == "running":
            await self.client.cancel(undone, asynchronous=True, reason="service-closed")
        if self._online is not None:
            await self._online.close()
        if self._listener is not None:
            await self._listener.close()
        if self._connection is not None:
            await self._connection.close()

    async def _close(self) -> None:
        client = self.client
        try:
            if client is not None and client.status != "closed":
                await self._leave()
                if client is not self._given:
                    await client.close()
        finally:
            if self._cluster is not None:
                await self._cluster.close()
