"""Target ``kubernetes``: one manifest with the scheduler, the instances and who may reach them.

A pod holds the ranks of one instance that are on one node of the placement: they share GPUs'
links and memory as planned. Pods of the same planned node are asked onto the same machine.
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from daskserve.deploy.ranks import NO_DASHBOARD, Rank, common_variables
from daskserve.deploy.script import command
from daskserve.deploy.site import Site
from daskserve.errors import ConfigError

_APP = "daskserve"
_PORT = 8786
_FIRST_WORKER_PORT = 9000
_GRACE_S = 30  # for processes to end once they are drained


def render(nodes: dict[int, list[Rank]], site: Site, folder: str) -> dict[str, str]:
    """The manifest by its file name (ConfigError: the image is missing)."""
    if not site.kubernetes.image:
        raise ConfigError("kubernetes.image: name the container image that has daskserve")
    if site.device == "cpu" and site.cpus_per_rank:
        raise ConfigError("cpus_per_rank: on Kubernetes cpus_per_rank of its own section counts")
    parts: dict[tuple[str, int], list[Rank]] = {}
    for node, ranks in nodes.items():
        for rank in ranks:
            parts.setdefault((rank.instance, node), []).append(rank)
    spread = {name for name, _ in parts if sum(other == name for other, _ in parts) > 1}
    objects = [_network_policy(site), _scheduler_service(site), _scheduler(site)]
    for (name, node), ranks in sorted(parts.items(), key=lambda item: (item[0][1], item[0][0])):
        pod = f"{name}-node{node}" if name in spread else name
        objects += [_headless_service(pod, site), _part(pod, node, ranks, site)]
    head = "# Written by `daskserve deploy`.\n"
    texts = [yaml.safe_dump(one, sort_keys=False, width=100) for one in objects]
    return {"daskserve.yaml": head + "---\n".join(texts)}


def steps(nodes: dict[int, list[Rank]], site: Site, folder: str) -> list[str]:
    """What to do with the files, for people."""
    namespace = site.kubernetes.namespace
    return [
        f"kubectl apply -f {folder}/daskserve.yaml",
        f"then, in a pod of namespace {namespace}: daskserve run-batch --scheduler "
        f"{_scheduler_address(site)} --placement placement.yaml --model"
        f" {site.model or 'MODEL'} -i rows.jsonl -o answers.jsonl",
    ]


def _scheduler_address(site: Site) -> str:
    return f"{site.protocol}://{_APP}-scheduler:{_PORT}"


def _meta(name: str, site: Site, **labels: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": site.kubernetes.namespace,
        "labels": {"app.kubernetes.io/part-of": _APP, **labels},
    }


def _network_policy(site: Site) -> dict[str, Any]:
    """Only pods of the namespace reach ours: Dask trusts whoever gets to its ports."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta(_APP, site),
        "spec": {
            "podSelector": {"matchLabels": {"app.kubernetes.io/part-of": _APP}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {}}]}],
        },
    }


def _scheduler_service(site: Site) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(f"{_APP}-scheduler", site),
        "spec": {
            "type": "ClusterIP",
            "selector": {"app.kubernetes.io/name": f"{_APP}-scheduler"},
            "ports": [{"name": "dask", "port": _PORT, "targetPort": _PORT}],
        },
    }


def _headless_service(name: str, site: Site) -> dict[str, Any]:
    """A StatefulSet wants one; it opens nothing."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(name, site),
        "spec": {"clusterIP": "None", "selector": {"app.kubernetes.io/name": name}},
    }


def _scheduler(site: Site) -> dict[str, Any]:
    words = ["dask", "scheduler", "--port", str(_PORT), *NO_DASHBOARD]
    if site.protocol != "tcp":
        words += ["--protocol", site.protocol]
    probe = {"tcpSocket": {"port": _PORT}, "periodSeconds": 10, "failureThreshold": 6}
    container = _container("scheduler", _shell([f"exec {' '.join(words)}"], site), site)
    container |= {
        "ports": [{"name": "dask", "containerPort": _PORT}],
        "readinessProbe": probe,
        "livenessProbe": probe | {"initialDelaySeconds": 30},
        "resources": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "4Gi"}},
    }
    name = f"{_APP}-scheduler"
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(name, site),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # never two schedulers
            "selector": {"matchLabels": {"app.kubernetes.io/name": name}},
            "template": _template(name, {}, container, site, grace_s=_GRACE_S),
        },
    }


def _part(pod: str, node: int, ranks: list[Rank], site: Site) -> dict[str, Any]:
    """The ranks of an instance on one node. Never two pods at once: ranks are not to be doubled."""
    labels = {f"{_APP}/node": str(node), f"{_APP}/instance": ranks[0].instance}
    kubernetes = site.kubernetes
    container = _container("ranks", _shell(_start(ranks, site), site), site)
    limits: dict[str, Any] = {
        "cpu": _times(kubernetes.cpus_per_rank, len(ranks)),
        "memory": _times(kubernetes.memory_per_rank, len(ranks)),
    }
    if site.device == "cuda":
        limits[kubernetes.gpu_resource] = len(ranks)
    port = _FIRST_WORKER_PORT
    container |= {
        "ports": [
            {"name": f"rank-{index}", "containerPort": port + index} for index in range(len(ranks))
        ],
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 10},
        # A worker that is replaced is away for some seconds, and a large model loads for minutes.
        "livenessProbe": {
            "tcpSocket": {"port": port},
            "initialDelaySeconds": 120,
            "periodSeconds": 20,
            "failureThreshold": 9,
        },
        "resources": {"limits": limits, "requests": dict(limits)},
    }
    grace_s = site.margin_s + _GRACE_S
    template = _template(pod, labels, container, site, grace_s=grace_s)
    template["spec"]["affinity"] = {"podAffinity": _together(node)}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _meta(pod, site, **labels),
        "spec": {
            "replicas": 1,
            "serviceName": pod,
            "selector": {"matchLabels": {"app.kubernetes.io/name": pod}},
            "template": template,
        },
    }


def _start(ranks: list[Rank], site: Site) -> list[str]:
    """Lines that start the ranks and wait; the container's GPUs are counted from 0."""
    lines = ["pids=()", 'start() { "$@" & pids+=("$!"); }']
    lines.append("trap 'kill -TERM \"${pids[@]}\" 2>/dev/null || true' TERM")
    for index, rank in enumerate(ranks):
        port = _FIRST_WORKER_PORT + index
        where = [_scheduler_address(site), "--worker-port", str(port)]
        where += ["--interface", shlex.quote(site.interface)] if site.interface else []
        variables = dict(rank.variables)
        if site.device == "cuda":
            variables["CUDA_VISIBLE_DEVICES"] = str(index)
        lines.append(command("start env", variables, rank, site, where, None))
    lines.append('for pid in "${pids[@]}"; do')
    lines.append('  while kill -0 "$pid" 2>/dev/null; do wait "$pid" || true; done')
    return [*lines, "done"]


def _shell(lines: list[str], site: Site) -> list[str]:
    return ["bash", "-c", "\n".join([*site.activate, *lines])]


def _together(node: int) -> dict[str, Any]:
    """Onto the machine of the other pods of this node of the placement."""
    term = {
        "labelSelector": {"matchLabels": {f"{_APP}/node": str(node)}},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def _container(name: str, words: list[str], site: Site) -> dict[str, Any]:
    variables = common_variables(site) | {"DASKSERVE_CACHE": "/tmp/daskserve", "HOME": "/tmp"}
    host = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    mounts: list[dict[str, Any]] = [
        {"name": "scratch", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if site.kubernetes.claim:
        path = site.kubernetes.claim_path
        mounts.append({"name": "models", "mountPath": path, "readOnly": True})
    return {
        "name": name,
        "image": site.kubernetes.image,
        "command": words,
        "env": [
            *({"name": key, "value": value} for key, value in variables.items()),
            {"name": "DASK_DASKSERVE__RANK__HOST", "valueFrom": host},
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _template(
    name: str, labels: dict[str, str], container: dict[str, Any], site: Site, grace_s: int
) -> dict[str, Any]:
    kubernetes = site.kubernetes
    volumes: list[dict[str, Any]] = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": kubernetes.shared_memory}},
    ]
    if kubernetes.claim:
        claim = {"claimName": kubernetes.claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": kubernetes.user_id,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": grace_s,
        "containers": [container],
        "volumes": volumes,
    }
    if kubernetes.node_selector:
        spec["nodeSelector"] = dict(kubernetes.node_selector)
    own = {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": _APP, **labels}
    return {"metadata": {"labels": own}, "spec": spec}


def _times(quantity: str, count: int) -> str:
    """A quantity of Kubernetes for several ranks (ConfigError)."""
    digits = quantity.rstrip("KMGTPEikm")
    if not digits.isdigit():
        raise ConfigError(f"kubernetes: {quantity!r} must be a whole number and a unit, as 16Gi")
    return f"{int(digits) * count}{quantity[len(digits) :]}"
