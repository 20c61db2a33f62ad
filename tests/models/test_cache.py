import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from daskserve.errors import ModelError
from daskserve.models.cache import build_once, cached


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DASKSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_those_who_come_at_the_same_time_build_once():
    builds, start = [], threading.Barrier(4)

    def build(folder):
        builds.append(folder)
        (folder / "weights").write_text("all of it")

    def ask(_):
        start.wait(10)
        return (build_once("model", build) / "weights").read_text()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == ["all of it"] * 4
    assert len(builds) == 1


def test_a_failed_build_leaves_nothing_behind_and_can_be_repeated(cache):
    def fail(folder):
        (folder / "half").write_text("")
        raise ModelError("no network")

    with pytest.raises(ModelError, match="no network"):
        build_once("model", fail)
    assert cached("model") is None
    assert [path.name for path in (cache / "models").iterdir()] == [".model.lock"]
    assert build_once("model", lambda folder: None) == cache / "models" / "model"


def test_what_a_killed_build_left_is_removed(cache):
    left = cache / "models" / ".model-abc"
    left.mkdir(parents=True)
    build_once("model", lambda folder: None)
    assert not left.exists()


def test_a_cache_that_cannot_be_written_is_a_clear_error(cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="DASKSERVE_CACHE"):
        build_once("model", lambda folder: None)
