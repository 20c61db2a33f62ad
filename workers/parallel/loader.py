"""From a model directory to one rank's stage, with only that rank's weights in memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from daskserve.core.placement import Parallelism
from daskserve.core.shards import ShardMap
from daskserve.errors import InvalidParameter, ModelError
from daskserve.models.engine_packages import TRANSFORMERS_LOCK
from daskserve.workers.attention import ATTENTION_NAME
from daskserve.workers.forward import ModelShape
from daskserve.workers.parallel.checkpoint import Checkpoint
from daskserve.workers.parallel.computing import Computing
from daskserve.workers.parallel.families import COLUMN_SPLIT, ROW_SPLIT, Family, family_of
from daskserve.workers.parallel.group import RankGroup
from daskserve.workers.parallel.linear import RowSplitLinear
from daskserve.workers.parallel.stage import Stage, vocabulary_part


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A model directory as seen by an instance of several ranks: sizes, but no weights yet.

    Use `read_model`.
    """

    model_dir: Path
    config: PretrainedConfig
    family: Family
    shape: ModelShape
    shards: ShardMap

    def shared_out(self, stage_layers: tuple[int, ...]) -> ShardedModel:
        """The same with so many layers in each stage (InvalidParameter)."""
        return replace(self, shards=replace(self.shards, stage_layers=stage_layers))


def read_model(model_dir: Path, parallelism: Parallelism) -> ShardedModel:
    """Look at a model's configuration.

    Raises
    ------
    ModelError
        No such family on several ranks.
    InvalidParameter
        The model cannot be shared out like this.
    """
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for what it does not know
        raise ModelError(
            f"{model_dir} cannot be served by an instance of several workers: {error}"
        ) from error
    family = family_of(config)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, family.inner_size)
    if inner % parallelism.tp:
        limit = f"must divide the model's {family.inner_size} of {inner}"
        raise InvalidParameter("tp", parallelism.tp, limit)
    shape = ModelShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        context_tokens=config.max_position_embeddings,
        eos_token_ids=_eos_token_ids(model_dir, config),
    )
    shards = ShardMap(parallelism, config.num_hidden_layers, heads, kv_heads)
    return ShardedModel(model_dir, config, family, shape, shards)


def load_stage(model: ShardedModel, group: RankGroup, computing: Computing) -> Stage:
    """This rank's part of the model.

    Parameters
    ----------
    model, group
        Of the same parallelism.
    computing
        With what the stage computes; the weights go to its device, one after the other.

    Raises
    ------
    ModelError
        Weights are missing or do not fit the configuration.
    """
    shard = model.shards.of_rank(group.rank)
    base = _skeleton(model, shard.layers)
    for name, absent in _absent(model.family, group).items():
        setattr(base, name, absent())
    checkpoint = Checkpoint(model.model_dir, computing.dtype, computing.device)
    if group.parallelism.tp > 1:
        _split_linears(base, group)
    _fill(base, model.family.base, shard.first_layer, checkpoint, group)
    base.to(computing.device)  # what is computed and not stored
    head = None
    if group.is_last:
        head = _head(base, model, checkpoint, group)
    return Stage(base, head, model, group, computing)


def _skeleton(model: ShardedModel, layers: range) -> torch.nn.Module:
    """The module that runs ``layers``, without memory; it counts them from 0, as our pool does."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[layers.start : layers.stop]
    with TRANSFORMERS_LOCK, torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    base = whole.get_submodule(model.family.base).eval()
    if hasattr(base, "rotary_emb"):  # its frequencies are computed, not stored
        base.rotary_emb = type(base.rotary_emb)(config)
    return base


def _absent(family: Family, group: RankGroup) -> dict:
    first = {} if group.is_first else dict(family.first_only)
    return first | ({} if group.is_last else dict(family.last_only))


def _split_linears(base: torch.nn.Module, group: RankGroup) -> None:
    tp = group.parallelism.tp
    for module in list(base.modules()):
        if isinstance(getattr(module, "num_heads", None), int):
            module.num_heads //= tp
        for name, child in list(module.named_children()):
            has_bias = getattr(child, "bias", None) is not None
            with torch.device("meta"):
                if name in COLUMN_SPLIT:
                    outputs = child.out_features // tp
                    setattr(module, name, torch.nn.Linear(child.in_features, outputs, has_bias))
                elif name in ROW_SPLIT:
                    inputs = child.in_features // tp
                    split = RowSplitLinear(inputs, child.out_features, has_bias, group)
                    setattr(module, name, split)


def _fill(
    base: torch.nn.Module, prefix: str, first_layer: int, checkpoint: Checkpoint, group: RankGroup
) -> None:
    """Put this rank's weights in, one tensor after the other."""
    for name, parameter in list(base.named_parameters()):
        path, _, kind = name.rpartition(".")
        module = base.get_submodule(path)
        own = tuple(parameter.shape)
        rows = columns = None
        if group.parallelism.tp > 1:
            leaf = path.rpartition(".")[2]
            if leaf in COLUMN_SPLIT:
                rows = range(group.tp_rank * own[0], (group.tp_rank + 1) * own[0])
            elif leaf in ROW_SPLIT and kind == "weight":
                columns = range(group.tp_rank * own[1], (group.tp_rank + 1) * own[1])
        stored = f"{prefix}.{_in_whole(name, first_layer)}"
        weight = checkpoint.read(stored, rows, columns)
        if tuple(weight.shape) != own:
            raise ModelError(f"{stored} is {tuple(weight.shape)} for this rank, not {own}")
        setattr(module, kind, torch.nn.Parameter(weight, requires_grad=False))
    left = [name for name, buffer in base.named_buffers() if buffer.is_meta]
    if left:
        raise ModelError(f"the model has buffers that are not in its files: {', '.join(left[:3])}")


def _in_whole(name: str, first_layer: int) -> str:
    parts = name.split(".")
    if parts[0] == "layers":
        parts[1] = str(int(parts[1]) + first_layer)
    return ".".join(parts)


def _head(
    base: torch.nn.Module, model: ShardedModel, checkpoint: Checkpoint, group: RankGroup
) -> torch.Tensor:
    """This rank's rows of the vocabulary head; part of the embedding where that is held too."""
    rows = vocabulary_part(model.shape.vocab_size, group.parallelism.tp, group.tp_rank)
    is_tied = model.config.tie_word_embeddings
    if is_tied and group.is_first:
        return base.embed_tokens.weight[rows.start : rows.stop]
    own = "lm_head.weight"
    stored = f"{model.family.base}.embed_tokens.weight" if is_tied else own
    return checkpoint.read(stored, rows)


def _eos_token_ids(model_dir: Path, config: PretrainedConfig) -> frozenset[int]:
    ids = None
    if (model_dir / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(model_dir, local_files_only=True).eos_token_id
    if ids is None:
        ids = config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
