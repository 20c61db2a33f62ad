"""What a cluster is like, as far as starting workers on it needs to know: ``--site``."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from daskserve.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Tls(_Section):
    """Certificates for Dask's own TLS, as paths that are the same on every host."""

    ca_file: str
    cert: str
    key: str


class Slurm(_Section):
    """What ``sbatch`` is asked for beyond nodes and GPUs."""

    partition: str = ""
    account: str = ""
    walltime: str = Field(default="04:00:00", pattern=r"^(\d+-)?\d{1,2}(:\d\d){1,2}$")
    gres: str = "gpu"
    cpus_per_node: int | None = Field(default=None, ge=1)
    memory: str = ""
    extra: tuple[str, ...] = Field(default=(), strict=False)


class Kubernetes(_Section):
    """Where the pods run and what they mount."""

    namespace: str = "daskserve"
    image: str = ""
    claim: str = ""
    claim_path: str = "/models"
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: dict[str, str] = Field(default_factory=dict)
    cpus_per_rank: str = "4"
    memory_per_rank: str = "16Gi"
    shared_memory: str = "8Gi"
    user_id: int = Field(default=1000, ge=1)


class Site(_Section):
    """A cluster.

    Parameters
    ----------
    hosts
        By number of the node in the placement; for the target ``commands``.
    device
        ``cuda`` starts ``dask cuda worker``, ``cpu`` plain ``dask worker``.
    model
        Folder of the model, on storage that every host reads at the same path.
    activate
        Shell lines before anything starts, such as those that enter an environment.
    folder
        On storage that all hosts share: scheduler file and logs.
    scheduler_port
        0 takes a free one, which then only the scheduler file tells.
    protocol
        Of all of Dask's connections, KV included.
    interface
        Network interface of the workers; empty takes that of the host's name.
    infiniband, nvlink
        With ``ucx``: override what it finds out by itself.
    rmm_pool
        With ``ucx``: size of the GPU memory pool that buffers of transfers come from.
    cpus_per_rank
        On CPUs: binds every rank to so many cores of its host.
    margin_s
        So long before its end a job stops taking requests.
    tls, slurm, kubernetes
        See there.
    """

    hosts: tuple[str, ...] = Field(default=(), strict=False)
    device: Literal["cuda", "cpu"] = "cuda"
    model: str = ""
    activate: tuple[str, ...] = Field(default=(), strict=False)
    folder: str = ""
    scheduler_port: int = Field(default=8786, ge=0, le=65535)
    protocol: Literal["tcp", "ucx", "tls"] = "tcp"
    interface: str = ""
    infiniband: bool | None = None
    nvlink: bool | None = None
    rmm_pool: str = ""
    cpus_per_rank: int | None = Field(default=None, ge=1)
    margin_s: int = Field(default=120, ge=30)
    tls: Tls | None = None
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()


def read_site(path: str | Path | None, changes: dict[str, Any]) -> Site:
    """The cluster of a file, with what the command line says instead.

    Raises
    ------
    ConfigError
        Not readable, or a key or value that is not allowed; names the nearest valid key.
    """
    source = str(path) if path else "the command line"
    try:
        given = yaml.safe_load(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(given, dict | None):
        raise ConfigError(f"{path} must be a mapping with keys such as {', '.join(_EXAMPLES)}")
    try:
        site = Site.model_validate({**(given or {}), **changes})
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(error)}") from None
    if (site.protocol == "tls") != (site.tls is not None):
        raise ConfigError(f"{source}: protocol tls and the section tls go together")
    return site


_EXAMPLES = ("hosts", "device", "model", "activate")


def _explain(error: ValidationError) -> str:
    # An unknown key explains a missing one, so it comes first.
    problem = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    *parents, name = [str(part) for part in problem["loc"]]
    where = ".".join([*parents, name])
    if problem["type"] != "extra_forbidden":
        return f"{where}={problem['input']!r}: {problem['msg']}"
    sections: dict[str, type[BaseModel]] = {"slurm": Slurm, "kubernetes": Kubernetes, "tls": Tls}
    fields = (sections[parents[0]] if parents else Site).model_fields
    near = difflib.get_close_matches(name, fields, n=1)
    return f"{where} is not a key" + (f"; did you mean {near[0]}?" if near else "")
