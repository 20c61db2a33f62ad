"""The dashboard beside a server: a process of its own, so that neither slows the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from daskserve.errors import ConfigError
from daskserve.service import Service

_END_S = 5.0


def check_installed() -> None:
    """ConfigError where the dashboard's packages are missing."""
    if find_spec("panel") is None:
        raise ConfigError("--dashboard needs panel: pip install 'daskserve[dashboard]'")


class DashboardProcess:
    """Started once a service is open; ends with this process, whatever ends it.

    Parameters
    ----------
    port
        On loopback.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, service: Service) -> None:
        client: Any = service.client
        command = [sys.executable, "-m", "daskserve.cli", "dashboard", "--until-eof"]
        place = ["--scheduler", client.scheduler.address, "--port", str(self._port)]
        # It reads its standard input, which only we write to: it sees us go.
        self._process = subprocess.Popen([*command, *place], stdin=subprocess.PIPE)

    def stop(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def dashboard_beside(port: int | None) -> Iterator[Any]:
    """What `daskserve.server.run.run_server` takes as ``on_loaded``; no port, no dashboard."""
    if port is None:
        yield lambda service: None
        return
    process = DashboardProcess(port)
    try:
        yield process.start
    finally:
        process.stop()
