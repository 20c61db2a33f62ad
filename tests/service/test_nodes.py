"""Two nodes, which are network namespaces joined by a cable: what KV crosses it, to the byte.

DistServe's Algorithm 2 puts the same stages of prefill and decode on one node, so that KV stays
inside it. The control is the same system with the decode stages exchanged.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from distributed.comm import get_address_host
from transformers import AutoConfig, AutoModelForCausalLM

from daskserve.models import byte_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]

HOSTS = ("10.203.77.1", "10.203.77.2")
NAMES = Path("/etc/netns")
SCHEDULER = f"tcp://{HOSTS[0]}:8786"
LAYERS, HEADS, HEAD_DIM, BLOCK = 4, 4, 64, 16
PROMPT_TOKENS = [512] * 8
KV_BYTES = sum(PROMPT_TOKENS) * LAYERS * 2 * HEADS * HEAD_DIM * 4  # float32

DRIVER = """
import json, sys
from pathlib import Path
import dask
from daskserve import EngineConfig, SamplingParams, Service

def crossed():
    cable = Path("/sys/class/net/cable/statistics")
    return sum(int((cable / name).read_text()) for name in ("rx_bytes", "tx_bytes"))

scheduler, model, lengths = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
dask.config.set({
    "daskserve.service.start-timeout-s": 600,
    "daskserve.service.pull-connect-timeout-s": 60,
    "daskserve.service.pull-stall-timeout-s": 60,
})
config = EngineConfig(
    model=model, dtype="float32", num_kv_blocks=600, num_threads=1,
    rank_timeout_s=120, kv_pull_timeout_s=120,
)
with Service.attach(scheduler, config) as service:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = [[(7 * row + 3 * i) % 250 + 1 for i in range(n)] for row, n in enumerate(lengths)]
    crossed_before = crossed()
    answers = service.client.gather(service.map(prompts, params))
    num_bytes = crossed() - crossed_before
    pulled = service.kv_pulled()
print(json.dumps({
    "cable_bytes": num_bytes,
    "tokens": [answer.token_ids for answer in answers],
    "recomputes": sum(answer.timeline.num_recomputes for answer in answers),
    "pulled": [
        (rank, holder, counts.num_bytes, counts.num_pulls)
        for rank, of_holder in pulled.items() for holder, counts in of_holder.items()
    ],
}))
"""


def ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


def write_names(node: str) -> None:
    """The nodes' names as `ip netns exec` shows them; torch asks for them, and no DNS is there."""
    folder = NAMES / node
    folder.mkdir(parents=True)
    lines = ["127.0.0.1 localhost", *(f"{host} node-{i}" for i, host in enumerate(HOSTS))]
    (folder / "hosts").write_text("".join(line + "\n" for line in lines))
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Names of two namespaces with an address each, and a cable between them."""
    if shutil.which("ip") is None:
        pytest.skip("no command ip to make network namespaces with; install iproute2")
    names = (f"daskserve-{os.getpid()}-a", f"daskserve-{os.getpid()}-b")
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ends = [("netns", name, "name", "cable") for name in names]
        ip("link", "add", "netns", names[0], "name", "cable", "type", "veth", "peer", *ends[1])
        for name, host in zip(names, HOSTS, strict=True):
            write_names(name)
            ip("-n", name, "address", "add", f"{host}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(NAMES / name, ignore_errors=True)


@contextmanager
def processes(nodes: tuple[str, str], logs: Path) -> Iterator[Callable[..., None]]:
    """``start(node, *arguments, **rank)``: a Dask process on a node, with its place as a rank."""
    running: list[subprocess.Popen] = []

    def start(node: int, *arguments: str, **rank: object) -> None:
        place = {f"DASK_DASKSERVE__RANK__{name.upper()}": str(rank[name]) for name in rank}
        command = ["ip", "netns", "exec", nodes[node], sys.executable, "-m", "dask", *arguments]
        with (logs / f"{len(running)}.log").open("w") as log:
            running.append(
                subprocess.Popen(
                    command, env=os.environ | place, stdout=log, stderr=subprocess.STDOUT
                )
            )

    try:
        yield start
    finally:
        for process in running:
            process.terminate()
        deadline = time.monotonic() + 10
        for process in running:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def model(tmp_path) -> Path:
    """A model whose KV is much larger than its hidden states, which cross between stages."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=byte_tokenizer.VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
    )
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer.write(folder)
    return folder


def place(start: Callable[..., None], role: str, stages: tuple[int, int]) -> None:
    """An instance of two stages, each on its node; stage 0 is the head."""
    for number, node in enumerate(stages):
        resources = ("--resources", f"{role}=16") if number == 0 else ()
        worker = ("worker", SCHEDULER, "--host", HOSTS[node], "--no-nanny", "--no-dashboard")
        rank = dict(instance=f"{role.lower()}-0", number=number, pipeline_parallel=2)
        start(node, *worker, "--nthreads", "16", *resources, **rank)


def answer(nodes: tuple[str, str], model: Path, logs: Path, decode: tuple[int, int]) -> dict:
    """What came of the prompts with prefill stage i on node i, and decode stages on these."""
    logs.mkdir()
    with processes(nodes, logs) as start:
        start(0, "scheduler", "--host", HOSTS[0], "--port", "8786", "--no-dashboard")
        place(start, "PREFILL", (0, 1))
        place(start, "DECODE", decode)
        given = [SCHEDULER, str(model), json.dumps(PROMPT_TOKENS)]
        client = ["ip", "netns", "exec", nodes[0], sys.executable, "-c", DRIVER, *given]
        done = subprocess.run(client, capture_output=True, text=True, timeout=900)
    said = {path.name: path.read_text()[-2000:] for path in logs.glob("*.log")}
    assert done.returncode == 0, (done.stderr[-2000:], said)
    return json.loads(done.stdout.splitlines()[-1])


def node_of(address: str) -> int:
    return HOSTS.index(get_address_host(address))


def test_kv_crosses_between_nodes_only_where_segments_do(nodes, model, tmp_path):
    aligned = answer(nodes, model, tmp_path / "aligned", (0, 1))
    exchanged = answer(nodes, model, tmp_path / "exchanged", (1, 0))
    assert aligned["tokens"] == exchanged["tokens"]
    for found in (aligned, exchanged):
        assert found["recomputes"] == 0
        # Each decode stage pulls its layers from the one prefill stage that has them.
        assert len(found["pulled"]) == 2
        for _, _, num_bytes, num_pulls in found["pulled"]:
            assert (num_bytes, num_pulls) == (KV_BYTES // 2, len(PROMPT_TOKENS))
    assert all(node_of(rank) == node_of(holder) for rank, holder, *_ in aligned["pulled"])
    assert all(node_of(rank) != node_of(holder) for rank, holder, *_ in exchanged["pulled"])
    # The cable says the same: hidden states and messages cross in both, KV in one.
    print(f"KV {KV_BYTES} bytes, crossed {aligned['cable_bytes']}, {exchanged['cable_bytes']}")
    assert aligned["cable_bytes"] < KV_BYTES / 5
    assert 1 <= (exchanged["cable_bytes"] - aligned["cable_bytes"]) / KV_BYTES < 1.1
