"""On a cluster with TLS everything that we add is encrypted too."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from distributed import Client, Security

from daskserve import SamplingParams, Service


@pytest.fixture
def security(tmp_path) -> Security:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=dask"]
        + ["-days", "2", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    files = {}
    for role in ("scheduler", "worker", "client"):
        files |= {f"tls_{role}_key": key, f"tls_{role}_cert": certificate}
    return Security(tls_ca_file=certificate, require_encryption=True, **files)


def test_kv_and_tokens_travel_over_tls(cluster, mock, security: Security):
    params = SamplingParams(max_tokens=20)
    with (
        cluster(prefill=1, decode=1, security=security) as own,
        Client(own, security=security) as client,
        Service.attach(client, mock()) as service,
    ):
        completion = service.submit("hello", params).result()
        assert completion.timeline.num_recomputes == 0
        deltas = list(service.stream("hello", params))
        assert "".join(d.text for d in deltas) == completion.text
        assert len(deltas) > 10  # they came one by one, not with the result
        assert all(i.address.startswith("tls://") for i in service.info())
