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


@contextmanager
def dashboard_beside(port: int, service: Service) -> Iterator[None]:
    """A dashboard of a service that is open, on loopback; it ends with us, whatever ends us."""
    client: Any = service.client
    command = [sys.executable, "-m", "daskserve.cli", "dashboard", "--until-eof"]
    place = ["--scheduler", client.scheduler.address, "--port", str(port)]
    # It reads its standard input, which only we write to: it sees us go.
    process = subprocess.Popen([*command, *place], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
