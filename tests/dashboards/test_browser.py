"""Pages in a real browser."""

from __future__ import annotations

import pytest

from daskserve.dashboards.app import Dashboard
from daskserve.observe import Observation

from .browser import Tab, browser, dashboard
from .conftest import HOSTILE, hostile_job, sample_at

pytestmark = pytest.mark.ui
PAGES = [kind.path for kind, _ in Dashboard(None).pages]


def test_every_page_loads_and_hostile_names_stay_text(record):
    instance = sample_at(0).instances[0]
    named = [
        Observation(sample_at(second, model=HOSTILE), (hostile_job(),)) for second in range(40)
    ]
    path = record(*named)
    assert instance.name in path.read_text()
    with dashboard(path) as address, browser() as chromium:
        tab = Tab(chromium)
        seen = ""
        for name in PAGES:
            seen += tab.open(address, name).text
        assert tab.page.evaluate("window.hacked") is None
        assert tab.troubles == []
    assert HOSTILE in seen and "Time to first token" in seen and "decode-3" in seen
