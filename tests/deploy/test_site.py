from __future__ import annotations

import pytest

from daskserve.deploy.site import read_site
from daskserve.errors import ConfigError


def test_the_command_line_wins_over_the_file(tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text("device: cpu\nhosts: [a, b]\nslurm: {partition: gpu, extra: [--exclusive]}\n")
    site = read_site(path, {"hosts": ["c"]})
    assert (site.device, site.hosts, site.slurm.extra) == ("cpu", ("c",), ("--exclusive",))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("host: [a]", "host is not a key; did you mean hosts?"),
        ("slurm: {partitions: a}", "slurm.partitions is not a key; did you mean partition?"),
        ("slurm: {walltime: soon}", "slurm.walltime='soon'"),
        ("protocol: http", "protocol='http'"),
        ("protocol: tls", "protocol tls and the section tls go together"),
        ("[a]", "must be a mapping"),
        ("a: [", "cannot read"),
    ],
)
def test_what_is_wrong_with_a_site_file_is_named(tmp_path, text, part):
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_site(path, {})
    assert part in str(caught.value)
