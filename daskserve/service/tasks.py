"""The two tasks of a request as Dask runs them, and the one task of a colocated request.

Coroutines: a worker runs as many at once as it has slots, on one thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from distributed import Reschedule, get_worker

from daskserve.core.request import Completion, Prefilled, Request
from daskserve.errors import InstanceLost, RequestCancelled
from daskserve.service.names import INSTANCE_PLUGIN, decode_key, prefill_key

if TYPE_CHECKING:
    from daskserve.service.instance_plugin import InstancePlugin


async def prefill(request: Request) -> Prefilled:
    """Compute the prompt and its first token; the KV stays here until it is pulled."""
    async with _plugin_for(prefill_key(request.request_id)) as plugin:
        instance = await plugin.instance()
        on_token = plugin.on_token(request.token_sink)
        return await instance.prefill(request, plugin.address, on_token)


async def decode(request: Request, prefilled: Prefilled) -> Completion:
    """Pull the KV and decode to the end."""
    async with _plugin_for(decode_key(request.request_id)) as plugin:
        instance = await plugin.instance()
        on_token = plugin.on_token(request.token_sink)
        return await instance.decode(request, prefilled, plugin.pull, on_token)


async def generate(request: Request) -> Completion:
    """Prefill and decode on one colocated instance."""
    async with _plugin_for(decode_key(request.request_id)) as plugin:
        instance = await plugin.instance()
        return await instance.generate(request, plugin.on_token(request.token_sink))


@asynccontextmanager
async def _plugin_for(key: str) -> AsyncIterator[InstancePlugin]:
    plugin: InstancePlugin = get_worker().plugins[INSTANCE_PLUGIN]
    if plugin.is_cancelled(key):
        raise Reschedule
    try:
        yield plugin
    except InstanceLost as error:
        plugin.lose(error)
        raise Reschedule from error
    except RequestCancelled as error:
        # Nobody looks at the outcome of a cancelled task; when Dask has wanted it again
        # meanwhile, it takes this coroutine for the new run, which must then start over.
        raise Reschedule from error
