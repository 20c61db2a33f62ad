"""Small random models of every family that the engine runs exactly, and engines on a rig."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from daskserve.core.instance import EngineConfig, Role
from daskserve.core.kv import KVStream
from daskserve.core.params import SamplingParams
from daskserve.core.request import Prefilled, Request, TokenDelta
from daskserve.errors import KVUnavailable
from daskserve.text.tokenizer import Tokenizer
from daskserve.workers.engine import Engine, Reserved
from daskserve.workers.forward import Runner
from daskserve.workers.instance import Instance
from daskserve.workers.loading import build_engine, load_model
from daskserve.workers.sequence import Sequence

VOCAB = 211

_ROTARY = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    initializer_range=0.15,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_OPT = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    ffn_dim=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    max_position_embeddings=256,
    init_std=0.15,
    word_embed_proj_dim=48,
)
_GPT2 = dict(
    vocab_size=VOCAB,
    n_embd=48,
    n_layer=3,
    n_head=6,
    n_positions=256,
    initializer_range=0.15,
    bos_token_id=1,
    eos_token_id=2,
)
_MOE = dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)

FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", _ROTARY),
    "opt": ("opt", _OPT),
    "opt-350m": ("opt", _OPT | dict(word_embed_proj_dim=32, do_layer_norm_before=False)),
    "qwen2": ("qwen2", _ROTARY | dict(head_dim=8)),
    "qwen3": ("qwen3", _ROTARY),
    "qwen3_moe": ("qwen3_moe", _ROTARY | _MOE),
    "mistral": ("mistral", _ROTARY | dict(sliding_window=9)),
    "mixtral": ("mixtral", _ROTARY | dict(num_local_experts=4, sliding_window=None)),
    "gemma2": ("gemma2", _ROTARY | dict(sliding_window=9, query_pre_attn_scalar=16)),
    "gemma3": ("gemma3_text", _ROTARY | dict(sliding_window=9, sliding_window_pattern=2)),
    "phi3": ("phi3", _ROTARY | dict(sliding_window=None)),
    "gpt2": ("gpt2", _GPT2),
    "gpt_neox": ("gpt_neox", _ROTARY),
    "olmo2": ("olmo2", _ROTARY),
    "granite": ("granite", _ROTARY | dict(attention_multiplier=0.2, residual_multiplier=0.5)),
    "smollm3": ("smollm3", _ROTARY | dict(no_rope_layers=[1, 0, 1], use_sliding_window=False)),
}

# Sizes that the kernels take: heads of 32 features.
_WIDE = _ROTARY | dict(hidden_size=192, num_attention_heads=6, num_key_value_heads=3, head_dim=32)
_WIDE_OPT = _OPT | dict(hidden_size=192, word_embed_proj_dim=192)
_LLAMA3_ROTATION = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)

FUSED: dict[str, tuple[str, dict]] = {
    "fused-llama": ("llama", _WIDE | dict(hidden_size=96)),
    "fused-llama-one-kv-head": ("llama", _WIDE | dict(num_key_value_heads=1)),
    "fused-llama-scaled": (
        "llama",
        _WIDE | dict(tie_word_embeddings=True, rope_parameters=_LLAMA3_ROTATION),
    ),
    "fused-mistral": ("mistral", _WIDE | dict(sliding_window=19)),
    "fused-qwen2": (
        "qwen2",
        _WIDE | dict(use_sliding_window=True, sliding_window=19, max_window_layers=1),
    ),
    "fused-qwen3": ("qwen3", _WIDE | dict(head_dim=64)),
    "fused-smollm3": (
        "smollm3",
        _WIDE | dict(no_rope_layers=[1, 0, 1], use_sliding_window=False),
    ),
}
ATTENDED: dict[str, tuple[str, dict]] = {
    "wide-opt": ("opt", _WIDE_OPT),
    "wide-qwen3_moe": ("qwen3_moe", _WIDE | _MOE),
    "wide-mixtral": ("mixtral", _WIDE | dict(num_local_experts=4, sliding_window=19)),
    "wide-gemma3": ("gemma3_text", _WIDE | dict(sliding_window=19, sliding_window_pattern=2)),
    "wide-phi3": ("phi3", _WIDE | dict(sliding_window=None)),
    "wide-gpt2": ("gpt2", _GPT2 | dict(n_embd=192)),
    "wide-gpt_neox": ("gpt_neox", _WIDE),
    "wide-olmo2": ("olmo2", _WIDE),
    "wide-granite": ("granite", _WIDE | dict(attention_multiplier=0.2, residual_multiplier=0.5)),
}

OTHERS: dict[str, tuple[str, dict]] = {
    "falcon": (
        "falcon",
        dict(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2) | dict(num_attention_heads=6),
    ),
    "gpt_oss": ("gpt_oss", _ROTARY | dict(num_local_experts=4, sliding_window=9)),
}


def build(name: str, folder: Path) -> Path:
    """Write a random fp32 model of this family as a model directory."""
    model_type, settings = (FAMILIES | FUSED | ATTENDED | OTHERS)[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start as all ones or zeros: hide nothing
                parameter += torch.randn_like(parameter) * 0.2
    disable_progress_bar()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``family_dir(name)``: directory of that family's small random fp32 model."""
    return functools.cache(lambda name: build(name, tmp_path_factory.mktemp(name)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES)
    if "fused_family" in metafunc.fixturenames:
        metafunc.parametrize("fused_family", FUSED)
    if "attended_family" in metafunc.fixturenames:
        metafunc.parametrize("attended_family", ATTENDED)


def _pieces(way: list[memoryview] | KVStream) -> Iterable[memoryview]:
    return way.chunks if isinstance(way, KVStream) else way


class Rig:
    """Engines on one thread and a clock that only tests move: exact, repeatable schedules.

    With a PREFILL and a DECODE engine the KV is copied between them when ``pulls_ok`` says so
    for a request: True copies, False fails, None leaves the pull under way.
    """

    def __init__(self, *engines: Engine, pulls_ok: Callable[[str], bool | None] | None = None):
        self.by_role = {engine.role: engine for engine in engines}
        self.entry = engines[0]
        self.pulls_ok = pulls_ok or (lambda request_id: True)
        self.now = 0.0
        self.outcomes: dict[str, list[object]] = {}
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.started: list[Sequence] = []
        self.open_pulls: list[tuple[Sequence, Reserved]] = []
        self.is_overlapped = False
        self.num_early = 0
        self._is_early = False
        for engine in engines:
            engine.clock = lambda: self.now

    def submit(self, request: Request, streams: bool = False) -> Sequence:
        sequence = Sequence(request, streams=streams)
        self.started.append(sequence)
        self.entry.add(sequence)
        self._route()
        return sequence

    def abort(self, request_id: str) -> None:
        for engine in self.by_role.values():
            engine.abort(request_id)
        self._route()

    def step_decode_around_prefill(self) -> bool:
        """As `step`, the prefill engine's step falling into that of the decode engine."""
        prefill, decode = self.by_role[Role.PREFILL], self.by_role[Role.DECODE]
        decode_step = decode.schedule()
        moved = self._route() or decode_step is not None
        if decode_step is not None:
            decode.begin(decode_step)
        prefill_step = prefill.schedule()
        self._is_early = True
        moved |= self._route()
        if prefill_step is not None:
            prefill.execute(prefill_step)
            moved |= self._route() or True
        self._is_early = False
        if decode.open_steps.is_full or (decode_step is None and len(decode.open_steps)):
            decode.conclude(*decode.finish())
            moved = True
        for index in reversed(range(len(self.open_pulls))):
            self._judge_pull(index)
        return self._route() or moved

    def step(self) -> bool:
        """One step of every engine; False when nothing moved."""
        if self.is_overlapped:
            return self.step_decode_around_prefill()
        moved = False
        for engine in self.by_role.values():
            step = engine.schedule()
            moved |= self._route() or step is not None
            if step is not None:
                engine.begin(step)
            if engine.open_steps.is_full or (step is None and len(engine.open_steps)):
                engine.conclude(*engine.finish())
                moved = True
        return self._route() or moved

    def run(self, max_steps: int = 20_000) -> dict[str, object]:
        """Step until nothing moves; the last outcome of every request."""
        for _ in range(max_steps):
            if not self.step():
                return {key: outcomes[-1] for key, outcomes in self.outcomes.items()}
        raise AssertionError(f"still busy after {max_steps} steps")

    def _judge_pull(self, index: int) -> None:
        verdict = self.pulls_ok(self.open_pulls[index][0].request.request_id)
        if verdict is not None:
            self.end_pull(index, verdict)

    def end_pull(self, index: int, succeeds: bool) -> None:
        """Let an open pull end; what was aborted is pulled from nowhere."""
        sequence, reserved = self.open_pulls.pop(index)
        source, target = self.by_role[Role.PREFILL], self.by_role[Role.DECODE]
        if succeeds and sequence.handle is not None:
            try:
                self._copy(source, target, sequence.handle, reserved)
            except KVUnavailable:
                succeeds = False
        target.pull_ended(reserved.owner, succeeds, 0.0)
        self._route()

    def used_blocks(self) -> int:
        return sum(engine.pool.num_used for engine in self.by_role.values())

    def _copy(self, source, target, handle, reserved) -> None:
        sent = _pieces(source.pool.outgoing(source.holding.pin(handle, self.now)))
        data = b"".join(bytes(piece) for piece in sent)
        source.release(handle.request_id, handle.secret)
        for view in _pieces(target.pool.incoming(reserved.pages)):
            view[:], data = data[: view.nbytes], data[view.nbytes :]
        assert not data

    def _route(self) -> bool:
        any_events = False
        for engine in self.by_role.values():
            events, engine.events = engine.events, []
            for sequence, payload in events:
                any_events = True
                self._take(sequence, payload)
        return any_events

    def _take(self, sequence: Sequence, payload: object) -> None:
        request = sequence.request
        if isinstance(payload, TokenDelta):
            self.deltas.setdefault(request.request_id, []).append(payload)
        elif isinstance(payload, Reserved):
            self.open_pulls.append((sequence, payload))
            if not self._is_early:  # a pull ends between two steps
                self._judge_pull(len(self.open_pulls) - 1)
        elif isinstance(payload, Prefilled) and payload.handle is not None:
            self._decode(sequence, payload)
        else:
            answer = payload.completion if isinstance(payload, Prefilled) else payload
            self.outcomes.setdefault(request.request_id, []).append(answer)
            if Role.PREFILL in self.by_role:  # whoever drives a pair tells it that all is over
                self.by_role[Role.PREFILL].release(request.request_id, None)

    def _decode(self, sequence: Sequence, prefilled: Prefilled) -> None:
        if Role.DECODE not in self.by_role:
            self.outcomes.setdefault(prefilled.request_id, []).append(prefilled)
            return
        decode = self.by_role[Role.DECODE]
        follower = Sequence(
            sequence.request,
            streams=sequence.streams,
            handle=prefilled.handle,
            output_ids=[prefilled.first_token_id],
            logprobs=[prefilled.first_logprob] if prefilled.first_logprob else [],
            first_token_at=prefilled.first_token_at,
            prefill_queue_s=prefilled.prefill_queue_s,
            prefill_s=prefilled.prefill_s,
        )
        if self._is_early and decode.add_early(follower):
            self.num_early += 1
        else:
            decode.add(follower)
        self._route()


@pytest.fixture(scope="session")
def rig_type() -> type[Rig]:
    return Rig


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Engine]:
    """``make_engine(role, model="mock", **config)``; models are loaded once per test run.

    ``max_open`` has the mock keep so many steps open, as a pipeline does.
    """

    @functools.cache
    def parts(model: str, dtype: str, num_threads: int) -> tuple[Runner, Tokenizer]:
        return load_model(EngineConfig(model=model, dtype=dtype, num_threads=num_threads))

    def make(
        role: Role, model: str = "mock", dtype: str = "float32", max_open: int = 1, **settings
    ) -> Engine:
        config = EngineConfig(model=model, dtype=dtype, mock_prefill_s=0, mock_decode_s=0)
        config = replace(config, **({"num_kv_blocks": 256, "num_threads": 1} | settings))
        if model == "mock":
            runner, tokenizer = load_model(config)
            runner.max_open = max_open
            return build_engine(role, config, lambda _: (runner, tokenizer))
        runner, tokenizer = parts(model, dtype, config.num_threads)
        return build_engine(role, config, lambda _: (copy.copy(runner), tokenizer))

    return make


@pytest.fixture(scope="session")
def make_request() -> Callable[..., Request]:
    """``make_request(id, prompt, **params)``; an int is the length of a prompt made up of it."""

    def make(request_id: str, prompt: int | tuple[int, ...], seed: int = 0, **params) -> Request:
        if isinstance(prompt, int):
            rng = random.Random(f"{request_id}-{prompt}")
            prompt = tuple(rng.randrange(4, 300) for _ in range(prompt))
        return Request(request_id, prompt, SamplingParams(**params), 0.0, seed)

    return make


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Instance]]:
    """``start(role, **settings)``: a running mock instance, closed after the test."""
    instances = []
    times = dict(mock_prefill_s=0.0005, mock_decode_s=0.0005)

    def make(role: Role, load=load_model, **settings) -> Instance:
        config = EngineConfig(
            **(dict(model="mock", num_kv_blocks=64, block_size=4) | times | settings)
        )
        instance = Instance(role, config, load)
        instance.start()
        instances.append(instance)
        return instance

    yield make
    for instance in instances:
        await instance.close()
