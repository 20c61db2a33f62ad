"""OpenVINO GenAI's continuous batching on the model of `engine.py`: the fastest peer on CPUs.

Its pipeline reads GGUF, so the model's folder is written as GGUF once, values unchanged up to
float16. The KV cache is what the package chooses by itself, 8 bit where it can, so its tokens are
not those of transformers.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np


def write_gguf(folder: Path, target: Path) -> None:
    """A llama of ``folder`` (config.json, model.safetensors, tokenizer.json) as one GGUF file."""
    import gguf
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    _add_tokenizer(writer, tokenizer, folder)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, values in _weights(folder, heads):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(folder: Path, heads: dict[str, int]) -> Iterator[tuple[str, np.ndarray]]:
    from safetensors.torch import load_file

    from daskserve.models.gguf_convert import GGUF_NAMES

    theirs = {ours: name for name, ours in GGUF_NAMES.items()}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        if name in theirs:
            gguf_name = theirs[name]
        else:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            gguf_name = f"blk.{layer}.{theirs[part]}.weight"
            if (kind := part.split(".")[-1]) in heads:
                rows, columns = values.shape
                halves = values.reshape(heads[kind], 2, rows // heads[kind] // 2, columns)
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)
        yield gguf_name, values if values.ndim == 1 else values.astype(np.float16)


def _add_tokenizer(writer, tokenizer, folder: Path) -> None:
    import json

    import gguf

    described = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"] for token in described["added_tokens"]}
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in by_id])
    writer.add_token_types([kinds.CONTROL if i in special else kinds.NORMAL for _, i in by_id])
    writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)


def measure(
    folder: Path,
    dtype: str,
    threads: int,
    plan: dict,
    fixed_prompts: Callable[[int], list[list[int]]],
    ragged_prompts: list[list[int]],
) -> dict[str, float]:
    """The rates of `engine.py`'s rows, in tokens per second."""
    import openvino
    import openvino_genai

    properties = {
        "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[dtype],
        "INFERENCE_NUM_THREADS": threads,
        "scheduler_config": openvino_genai.SchedulerConfig(),
    }
    with tempfile.TemporaryDirectory() as scratch:
        gguf_file = Path(scratch) / "model.gguf"
        write_gguf(folder, gguf_file)
        pipeline = openvino_genai.LLMPipeline(str(gguf_file), "CPU", **properties)

    def seconds(prompts: list[list[int]], tokens: int) -> float:
        longest = max(map(len, prompts))
        ids = np.zeros((len(prompts), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))
        started_at = time.perf_counter()
        answer = pipeline.generate(inputs, max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        elapsed_s = time.perf_counter() - started_at
        lengths = {len(row) for row in answer.tokens}
        if len(answer.tokens) != len(prompts) or lengths != {tokens}:
            raise RuntimeError(f"{lengths} tokens came per prompt, {tokens} were asked")
        return elapsed_s

    def median(prompts: list[list[int]], tokens: int) -> float:
        return float(np.median([seconds(prompts, tokens) for _ in range(plan["rounds"])]))

    figures, tokens = {}, plan["tokens"]
    for batch in plan["batches"]:
        prompts = fixed_prompts(batch)
        seconds(prompts, 2)  # a new shape costs the first call more
        first_s, all_s = median(prompts, 1), median(prompts, tokens)
        if batch == 1:
            figures["prefill"] = len(prompts[0]) / first_s
        figures[f"decode_{batch}"] = batch * (tokens - 1) / (all_s - first_s)
    job_tokens = plan["job_tokens"]
    figures["ragged_job"] = len(ragged_prompts) * job_tokens / median(ragged_prompts, job_tokens)
    return figures
