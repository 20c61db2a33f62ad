"""Pages without a browser: what the feed has ends up in charts, tables and text."""

from __future__ import annotations

import time

import pytest
from bokeh.document import Document
from bokeh.models import ImportedStyleSheet
from panel.io.state import set_curdoc

from daskserve.dashboards.app import Dashboard, DashboardOptions
from daskserve.dashboards.feed import Feed
from daskserve.dashboards.instances import InstancesPage
from daskserve.dashboards.jobs import JobsPage
from daskserve.dashboards.live import LivePage
from daskserve.dashboards.numbers import Number
from daskserve.dashboards.sources import RecordedSource
from daskserve.dashboards.theme import DARK, LIGHT, number_text, seconds_text
from daskserve.errors import ConfigError
from daskserve.observe import Observation

from .conftest import HOSTILE, hostile_job, sample_at


@pytest.fixture
def feed_of(record):
    """A started feed over so many recorded observations."""
    feeds = []

    def start(*observations: Observation) -> Feed:
        feed = Feed(RecordedSource(record(*observations)))
        feed.start()
        feeds.append(feed)
        deadline = time.monotonic() + 10
        while feed.since(0)[1] < len(observations) and time.monotonic() < deadline:
            time.sleep(0.01)
        return feed

    yield start
    for feed in feeds:
        feed.stop()


def observed(count: int) -> list[Observation]:
    return [Observation(sample_at(second)) for second in range(count)]


def test_the_live_page_draws_the_history_and_what_comes(feed_of):
    feed = feed_of(*observed(90))
    page = LivePage(feed, LIGHT, 2.0)
    assert len(page._rows.data["time"]) == 90 and len(page._kv.data["time"]) == 360
    feed._take(Observation(sample_at(90)))
    page.update()
    page.update()
    assert len(page._rows.data["time"]) == 91 and len(page._kv.data["time"]) == 364
    assert "4.60" in page._numbers.object and "target 90%" in page._numbers.object
    assert page._heatmap.y_range.factors == ["decode-3", "decode-1", "prefill-2", "prefill-0"]


def test_violations_are_shaded_from_the_limit_to_the_p90(feed_of):
    page = LivePage(feed_of(*observed(60)), DARK, 1.0)
    data = page._rows.data
    over = [o - limit for o, limit in zip(data["ttft_over"], data["ttft_limit"], strict=True)]
    assert over[0] == pytest.approx(0.19 * 1.5 - 0.25) and over[40] == 0
    assert data["tpot_over"] == data["tpot_limit"]


def test_a_long_recording_is_thinned_to_what_a_chart_can_show(feed_of):
    page = LivePage(feed_of(*observed(2000)), LIGHT, 1.0)
    page._span.value = 3600
    assert 300 < len(page._rows.data["time"]) < 400
    page._span.value = 300
    assert len(page._rows.data["time"]) == 301


def test_instances_are_patched_in_place(feed_of):
    feed = feed_of(*observed(3))
    page = InstancesPage(feed, LIGHT)
    table = page._table.value
    assert list(table["role"]) == ["prefill", "prefill", "decode", "decode"]
    feed._take(Observation(sample_at(50)))
    page.update()
    assert page._table.value is table and table["tokens"][0] == 1050
    feed._take(Observation(sample_at(51, num_instances=5)))
    page.update()
    assert len(page._table.value) == 5


def test_without_data_pages_say_so(feed_of):
    feed = feed_of()
    assert "No instances" in InstancesPage(feed, LIGHT)._head.object
    assert "No batch job" in JobsPage(feed, LIGHT)._jobs.object
    assert "–" in LivePage(feed, LIGHT, 1.0)._numbers.object


def test_what_others_wrote_is_never_html(feed_of):
    page = JobsPage(feed_of(Observation(sample_at(0), (hostile_job(),))), LIGHT)
    assert HOSTILE not in page._jobs.object and "&lt;img" in page._jobs.object
    assert page._failed.value["custom_id"][0] == HOSTILE
    assert all(f == {"type": "plaintext"} for f in page._failed.formatters.values())


def test_a_recording_that_grows_is_followed(record):
    path = record(*observed(2))
    feed = Feed(RecordedSource(path))
    feed.start()
    seen: list[int] = []
    feed.listen(lambda: seen.append(feed.since(0)[1]))
    text = path.read_bytes()
    with path.open("ab") as file:
        file.write(text.splitlines(keepends=True)[-1])
    deadline = time.monotonic() + 10
    while feed.since(0)[1] < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    feed.stop()
    assert feed.since(0)[1] == 3 and seen[-1] == 3


def test_a_damaged_recording_is_reported_not_repeated(record):
    path = record(*observed(2))
    with path.open("ab") as file:
        file.write(b"{}\n")
    feed = Feed(RecordedSource(path))
    feed.start()
    feed._thread.join(10)
    assert "line 4 is no observation" in feed.trouble and feed.since(0)[1] == 2


def test_trends_need_data_and_small_ones_are_steady():
    assert Number("", "", [1.0] * 5, number_text).change is None
    assert Number("", "", [1.0] * 45 + [2.0] * 5, number_text).change == pytest.approx(1.0)
    assert Number("", "", [0.0] * 40, number_text).change is None


def test_numbers_are_short():
    shown = [number_text(v) for v in (0, 0.01234, 1.234, 12.34, 123.4, 1234.5, None)]
    assert shown == ["0", "0.0123", "1.23", "12.3", "123", "1,234", "–"]
    assert [seconds_text(v) for v in (0.0123, 1.5, 185, 7300)] == [
        "12.3 ms",
        "1.50 s",
        "3 min 05 s",
        "2 h 01 min",
    ]


@pytest.mark.parametrize("origins", [(), ("*",), ("*.example.org:80",), ("host:port",)])
def test_others_get_in_by_explicit_origins_only(origins):
    with pytest.raises(ConfigError, match="allow-origin"):
        DashboardOptions(host="0.0.0.0", origins=origins)


def test_no_page_looks_for_anything_on_the_internet(feed_of):
    feed = feed_of(*observed(3))
    dashboard = Dashboard(feed)
    for kind, make in dashboard.pages:
        document = Document()
        with set_curdoc(document):
            page = dashboard._app(kind, make)()
            page.server_doc(document)
            feed._take(Observation(sample_at(4, num_instances=5)))
        sheets = [s.url for r in document.roots for s in r.select({"type": ImportedStyleSheet})]
        assert sheets, kind
        assert [url for url in sheets if "//" in url] == []
    dashboard.refiner.close()
