from __future__ import annotations

import inspect
import os
import ssl
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from starlette.routing import Route

from daskserve.cli import main
from daskserve.errors import ConfigError
from daskserve.server import keys as keys_module
from daskserve.server.gate import LOOPBACK_NAMES
from daskserve.server.keys import KeyRing, load_keys

KEYS = ("first-key-of-the-test", "second-key-of-the-test")


@pytest.fixture(scope="module")
def guarded(server, alongside, tmp_path_factory):
    """Another server on the same scheduler, with keys and a check of the host."""
    state = tmp_path_factory.mktemp("guarded") / "state"
    with alongside(server, keys=KEYS, hosts=LOOPBACK_NAMES, state_folder=state) as guarded:
        yield guarded


def test_every_route_but_health_needs_a_key(guarded):
    assert {route.path for route in guarded.routes} >= {"/metrics", "/v1/files", "/v1/batches"}
    with guarded.http() as http:
        for route in (*guarded.routes, Route("/none", print)):
            path = route.path.replace(":path", "")
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
                answer = http.request(method, path)
                if (method, path) == ("GET", "/health"):
                    assert answer.status_code == 200
                elif path != "/health":
                    assert answer.status_code == 401, (method, path)
                    assert answer.json()["error"]["code"] == "invalid_api_key"
        for header in ("Bearer wrong", f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x", "Bearer", "é"):
            headers = {"authorization": header.encode()}
            assert http.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("key", KEYS)
def test_any_of_several_keys_opens(guarded, key):
    assert [model.id for model in guarded.client(api_key=key).models.list()] == ["mock"]


def test_keys_are_compared_in_constant_time():
    assert "hmac.compare_digest" in inspect.getsource(keys_module.KeyRing.number_of)
    assert KEYS[0] not in repr(KeyRing(KEYS))


def test_keys_come_from_file_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DASKSERVE_API_KEYS", f" {KEYS[0]} ,")
    file = tmp_path / "keys"
    file.write_text(f"# rotated in May\n{KEYS[1]}\n\n")
    ring = load_keys(str(file))
    assert [ring.number_of(key) for key in (*KEYS, "third")] == [0, 1, None]
    for content in ("", "# none\n", "short\n", "with a space in it all\n"):
        file.write_text(content)
        with pytest.raises(ConfigError) as caught:
            load_keys(str(file))
        assert "with a space" not in str(caught.value)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:80", ""])
def test_a_page_whose_name_was_pointed_here_is_refused(guarded, host):
    with guarded.http() as http:
        for path in ("/health", "/v1/models"):
            assert http.get(path, headers={"host": host}).status_code == 403


def test_pages_of_other_origins_are_refused(guarded):
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    with guarded.http() as http:
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
            answer = http.post("/v1/completions", headers={**headers, "origin": origin}, json={})
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
        answer = http.get("/v1/models", headers={**headers, "origin": guarded.url})
        assert answer.status_code == 200


def test_only_json_is_read(server):
    with server.http() as http:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            headers = {"content-type": kind}
            answer = http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
            assert answer.status_code == 415


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines"),
        (["--host", "::"], "can be reached from other machines"),
        (["--host", "0.0.0.0", "--api-key-file", "KEYS"], "that needs --tls-cert"),
        (["--host", "0.0.0.0", "--tls-cert", "KEYS", "--tls-key", "KEYS"], "and API keys"),
        (["--tls-cert", "KEYS"], "--tls-cert and --tls-key go together"),
        (["--tls-cert", "none.pem", "--tls-key", "none.pem"], "no file none.pem"),
        (["--api-key-file", "none"], "cannot read keys from none"),
        (["--port", "1"], "cannot listen on"),
    ],
)
def test_an_open_door_is_refused_before_anything_starts(tmp_path, options, part):
    if options[0] == "--port" and os.geteuid() == 0:
        pytest.skip("root may listen anywhere")
    (tmp_path / "KEYS").write_text(KEYS[0])
    given = [str(tmp_path / "KEYS") if option == "KEYS" else option for option in options]
    result = CliRunner().invoke(main, ["serve", "--model", "mock", *given])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert part in result.stderr


def test_tls_needs_a_client_that_knows_the_certificate(server, alongside, certificate):
    with alongside(server, tls=certificate) as secure:
        assert secure.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=certificate["tls_cert"])
        with secure.http(verify=trusted) as http:
            assert http.get("/v1/models").status_code == 200
        with pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"), secure.http() as http:
            http.get("/v1/models")
        with pytest.raises(Exception, match="disconnected|reset"), secure.http() as http:
            http.get(secure.url.replace("https", "http"))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("tls")
    paths = {name: str(folder / f"{name}.pem") for name in ("tls_cert", "tls_key")}
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        " -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
        f" -keyout {paths['tls_key']} -out {paths['tls_cert']}"
    )
    try:
        subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return paths
