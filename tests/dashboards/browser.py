"""A dashboard in a process of its own, and Debian's Chromium to look at it."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium")
IDLE = "window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle"
_EMPTY_CHART = "could not set initial ranges"
"""What Bokeh says of a chart over time whose first second has not been seen."""
_DASHBOARD = r"dashboard on (http://\S+)/"
_ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage"]


@contextmanager
def dashboard(*arguments: str | Path) -> Iterator[str]:
    """Its address, without a slash at the end."""
    command = [sys.executable, "-m", "daskserve.cli", "dashboard", "--port", "0", "--until-eof"]
    with subprocess.Popen(
        [*command, *map(str, arguments)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        said: list[str] = []
        address = None
        try:
            for line in process.stderr:
                said.append(line)
                if found := re.search(_DASHBOARD, line):
                    address = found[1]
                    break
            if address is not None:
                yield address
        finally:
            process.stdin.close()
            process.wait(30)
            said += process.stderr
    assert address is not None and "Traceback" not in "".join(said), "".join(said)


@contextmanager
def server_with_dashboard(*arguments: str | Path) -> Iterator[tuple[str, str]]:
    """Addresses of ``daskserve serve`` and of the dashboard that it starts."""
    command = [sys.executable, "-m", "daskserve.cli", "serve", "--port", "0", "--dashboard"]
    said: list[str] = []
    with subprocess.Popen(
        [*command, "--dashboard-port", "0", *map(str, arguments)], stderr=subprocess.PIPE, text=True
    ) as process:
        reader = threading.Thread(target=lambda: said.extend(process.stderr))
        reader.start()

        def address(pattern: str) -> str:
            deadline = time.monotonic() + 100
            while not (found := re.search(pattern, "".join(said))):
                assert time.monotonic() < deadline and process.poll() is None, said
                time.sleep(0.1)
            return found[1]

        try:
            yield address(r"listening on (http://\S+)/v1"), address(_DASHBOARD)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            reader.join(10)
    assert process.returncode == 0 and "Traceback" not in "".join(said), "".join(said)


@contextmanager
def browser() -> Iterator[object]:
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        try:
            yield chromium
        finally:
            chromium.close()


class Tab:
    """One tab that notes whatever goes wrong in it."""

    def __init__(self, chromium, theme: str = "light", width: int = 1400, height: int = 900):
        self._context = chromium.new_context(viewport={"width": width, "height": height})
        self._context.set_default_timeout(60_000)
        self._theme = theme
        self.page = self._context.new_page()
        self.troubles: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("requestfailed", lambda request: self.troubles.append(request.url))

    def _on_console(self, message) -> None:
        if message.type in ("error", "warning") and _EMPTY_CHART not in message.text:
            self.troubles.append(message.text)

    def open(self, address: str, name: str) -> Tab:
        """Go to a page and wait until it is drawn."""
        cookie = {"name": "daskserve_theme", "value": self._theme, "url": address}
        self._context.add_cookies([cookie])
        self.page.goto(f"{address}/{name}")
        self.page.wait_for_function(IDLE)
        return self

    @property
    def text(self) -> str:
        """All that can be read, inside of components too."""
        return self.page.evaluate(
            """() => {
              const read = (node) => [...node.childNodes].map(child =>
                child.nodeType === 3 ? child.textContent
                : ["STYLE", "SCRIPT"].includes(child.nodeName) ? ""
                : read(child) + (child.shadowRoot ? read(child.shadowRoot) : "")).join(" ");
              return read(document.body);
            }"""
        )

    def column(self, name: str) -> list:
        """A column of the first data source of the document that has one of this name."""
        return self.page.evaluate(
            """(name) => {
              for (const model of Bokeh.documents[0]._all_models.values())
                if (model.type === "ColumnDataSource" && model.data instanceof Map
                    ? model.data.has(name) : model.data && name in model.data)
                  return [...(model.data instanceof Map ? model.data.get(name) : model.data[name])];
              return [];
            }""",
            name,
        )

    def until(self, condition: Callable[[], bool], within_s: float = 30.0) -> None:
        """Wait while the browser goes on."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            self.page.wait_for_timeout(100)

    def close(self) -> None:
        self._context.close()
