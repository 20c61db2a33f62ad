"""For nannies, as ``--preload-nanny``: told to end, they have their worker drain first.

``dask worker`` and ``dask cuda worker`` end their nannies at SIGTERM, and a nanny ends its worker
within seconds, whatever that runs. SLURM and shells may signal a process twice: only the first
time counts here, or the second one would end it at once. SIGUSR1 means the same as SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from typing import Any

from distributed import Nanny

from daskserve.config import settings
from daskserve.service.names import LEAVE

logger = logging.getLogger(__name__)


def dask_setup(nanny: Nanny) -> None:
    """Dask calls it when the nanny is up."""
    if not _has_signals():
        return
    end = signal.getsignal(signal.SIGTERM)
    if not callable(end):  # nobody waits for signals here
        return
    is_ending = False

    def on_term(number: int, frame: Any) -> None:
        nonlocal is_ending
        if not is_ending:
            is_ending = True
            end(number, frame)
            signal.signal(signal.SIGTERM, on_term)  # Dask has given it back to its default

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGUSR1, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))


def _has_signals() -> bool:
    return threading.current_thread() is threading.main_thread()


async def dask_teardown(nanny: Nanny) -> None:
    """Dask calls it before the nanny ends its worker."""
    if _has_signals():  # once Dask has heard the signal, it gives it back to its default again
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    if nanny.process is None or nanny.worker_address is None:
        return
    limit_s = settings().drain.margin_s
    try:
        async with asyncio.timeout(limit_s), nanny.rpc(nanny.worker_address) as worker:
            await getattr(worker, LEAVE)()
    except Exception as error:  # no service has used the worker, or it is on its way out itself
        logger.debug("the worker of %s ends without draining: %r", nanny.address, error)
