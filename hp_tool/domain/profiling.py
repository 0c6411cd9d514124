"""What the built-in profiler runs. Everything else is refused by name: a number measured on something else would be worse
than none. A search asks before it pays for runs, and the profiler before it starts one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from hp_tool.domain.hardware import DEFAULT_RANK_ORDER, ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ContextCommunication, Strategy
from hp_tool.domain.pipeline_split import splits_unevenly
from hp_tool.domain.workload import TrainingWorkload


class Sizes(Protocol):
    """A ParallelConfig, or the same fields of many candidates as arrays of shape (n,)."""

    @property
    def context_parallel_size(self) -> Any: ...
    @property
    def expert_parallel_size(self) -> Any: ...
    @property
    def expert_tensor_parallel_size(self) -> Any: ...
    @property
    def tensor_parallel_size(self) -> Any: ...
    @property
    def pipeline_parallel_size(self) -> Any: ...
    @property
    def virtual_pipeline_parallel_size(self) -> Any: ...
    @property
    def zero_stage(self) -> Any: ...
    @property
    def data_parallel_shard_size(self) -> Any: ...
    @property
    def pipeline_schedule(self) -> Any: ...


ENGINES = ("megatron-core", "torch-fsdp")
"""Frameworks that the profiler has an engine for."""

_USUAL: dict[str, tuple[Any, ...]] = {
    "norm_vectors": (None,),
    "norms_per_layer": (2,),
    "query_key_norm": (None, "head"),
    "embedding_norm": (False,),
    "final_norm": (True,),
    "attention_sinks": (False,),
    "output_bias": (None, False),
    "head_dense": (None, "none"),
    "sentence_head": (None, False),
    "type_vocab_size": (None, 0),
    "expert_bias": (False,),
    "router_bias": (False,),
}
"""What a model's details may be in a run."""


def unprofiled_model(model: ModelSpec, *, sequence_length: int, of: str) -> Iterator[tuple[str, str]]:
    """(field, words) of what a model has and no run builds. `of`: the query's field that says how long sequences are."""
    rules = (
        (model.architecture != "decoder", "model.architecture", f"architecture: {model.architecture}"),
        (
            model.kv_lora_rank is not None and model.positions != "rotary",
            "model.position_embedding",
            "latent attention without rotary positions",
        ),
        (
            bool(model.num_experts) and model.has_mlp_bias,
            "model.mlp_bias",
            "experts with biases (mlp_bias)",
        ),
        (
            model.num_nextn_predict_layers > 0,
            "model.num_nextn_predict_layers",
            "multi-token prediction (num_nextn_predict_layers)",
        ),
        (
            model.positions == "learned" and 0 < (model.max_position_embeddings or 0) < sequence_length,
            of,
            f"a sequence_length above max_position_embeddings {model.max_position_embeddings}",
        ),
        (model.positions == "relative", "model.position_embedding", "position_embedding: relative"),
        (model.has_mlp_bias and not model.has_attention_bias, "model.mlp_bias", "mlp_bias without attention_bias"),
        (
            model.attention_output_bias not in (None, model.has_mlp_bias),
            "model.attention_output_bias",
            "an attention_output_bias other than mlp_bias",
        ),
        (
            (model.sliding_window or sequence_length) < sequence_length,
            "model.sliding_window",
            "a sliding_window shorter than sequence_length",
        ),
        *(
            (getattr(model, name) not in usual, f"model.{name}", f"{name}: {getattr(model, name)}")
            for name, usual in _USUAL.items()
        ),
    )
    return ((field, words) for unsupported, field, words in rules if unsupported)


def unprofiled(*, model: ModelSpec, training: TrainingWorkload) -> Iterator[tuple[str, str]]:
    """(field, words) of what no configuration of this query can be run with; nothing where all is well."""
    yield from unprofiled_model(model, sequence_length=training.sequence_length, of="training.sequence_length")
    rules = (
        (training.framework not in ENGINES, "training.framework", f"framework: {training.framework}"),
        (training.precision not in ("bf16", "fp16", "fp32", "fp8"), "training.precision", f"precision: {training.precision}"),
        (bool(training.frozen), "training.frozen", "frozen parts"),
        (training.task != "pretrain" or training.lora is not None, "training.task", f"task: {training.task}"),
        (
            training.packed or training.sequence_lengths is not None,
            "training.packed" if training.packed else "training.sequence_lengths",
            "packed or unequal sequences",
        ),
        (training.offload not in (None, "none"), "training.offload", f"offload: {training.offload}"),
        (training.overlap is not None, "training.overlap", "overlap"),
        (training.offload_fraction != 1.0, "training.offload_fraction", f"offload_fraction: {training.offload_fraction}"),
        (training.cuda_graphs, "training.cuda_graphs", "cuda_graphs"),
        (training.optimizer not in ("adam", "sgd"), "training.optimizer", f"optimizer: {training.optimizer}"),
        (
            training.parameter_precision not in (None, _stored_precision(training)),
            "training.parameter_precision",
            f"parameter_precision: {training.parameter_precision} with precision {training.precision}",
        ),
        (
            training.gradient_precision not in (None, "fp32", "bf16" if training.precision == "fp8" else training.precision),
            "training.gradient_precision",
            f"gradient_precision: {training.gradient_precision}",
        ),
        (
            training.optimizer_precision not in (None, "fp32"),
            "training.optimizer_precision",
            f"optimizer_precision: {training.optimizer_precision}",
        ),
        (
            training.exp_avg_sq_precision not in (None, "fp32"),
            "training.exp_avg_sq_precision",
            f"exp_avg_sq_precision: {training.exp_avg_sq_precision}",
        ),
        (
            training.master_precision not in (None, "fp32"),
            "training.master_precision",
            f"master_precision: {training.master_precision}",
        ),
    )
    yield from ((field, words) for unsupported, field, words in rules if unsupported)
    if training.framework == "torch-fsdp":
        yield from _unprofiled_fsdp(model, training)


def _stored_precision(training: TrainingWorkload) -> str:
    """What an engine stores parameters in: FSDP casts what it gathers, Megatron keeps a master copy besides."""
    if training.framework == "torch-fsdp":
        return "fp32"
    return "bf16" if training.precision == "fp8" else training.precision


def _unprofiled_fsdp(model: ModelSpec, training: TrainingWorkload) -> Iterator[tuple[str, str]]:
    """What the plain-torch engine leaves out of what Megatron Core runs."""
    rules = (
        (model.num_experts is not None, "model.num_experts", "mixture-of-experts models (num_experts) under torch-fsdp"),
        (model.kv_lora_rank is not None, "model.kv_lora_rank", "latent attention (kv_lora_rank) under torch-fsdp"),
        (training.precision not in ("bf16", "fp32"), "training.precision", f"precision: {training.precision} under torch-fsdp"),
        (training.dropout > 0.0, "training.dropout", "dropout under torch-fsdp"),
        (training.attention != "flash", "training.attention", f"attention: {training.attention} under torch-fsdp"),
        (training.cross_entropy != "unfused", "training.cross_entropy", "cross_entropy: fused under torch-fsdp"),
        (
            training.gradient_precision not in (None, "fp32"),
            "training.gradient_precision",
            f"gradient_precision: {training.gradient_precision} under torch-fsdp",
        ),
    )
    yield from ((field, words) for unsupported, field, words in rules if unsupported)


def unprofiled_layout(cluster: ClusterSpec, strategy: Strategy) -> Iterator[tuple[str, str]]:
    """(field, words) of what the layout of ranks and stages asks and is not run."""
    if strategy.pipeline_layout is not None:
        yield "parallel.pipeline_layout", f"pipeline_layout: {strategy.pipeline_layout.text}"
    if strategy.moe_token_dispatcher_type == "flex":  # noqa: S105 (a token is no password here)
        yield "parallel.moe_token_dispatcher_type", "moe_token_dispatcher_type: flex, which needs DeepEP"
    if cluster.kinds:
        yield "cluster.stages", "two kinds of GPU (stages)"
    if cluster.rank_order != DEFAULT_RANK_ORDER:
        yield "parallel.rank_order", f"rank_order: {cluster.rank_order}"


def unprofiled_sizes(
    sizes: Sizes, *, model: ModelSpec, training: TrainingWorkload, gpu: str, communication: ContextCommunication | None
) -> Iterator[tuple[Any, str]]:
    """(whether it is so, words) for each thing a configuration may ask that is not run; bools, or arrays of shape (n,).

    communication: of context parallelism. Rings and head exchanges are Transformer Engine's, which has no CPU version.
    """
    t, zero = sizes.tensor_parallel_size, sizes.zero_stage
    context = sizes.context_parallel_size > 1
    gathered = communication == "all_gather"
    yield (
        context & (gpu == "cpu" and not gathered),
        f"context parallelism by {communication or 'p2p'} on a CPU; all_gather is run",
    )
    yield context & (communication == "a2a+p2p"), "context parallelism by a2a+p2p"
    yield context & (training.attention == "unfused"), "context parallelism with unfused attention"
    dense = model.num_experts is None
    yield (
        dense & ((sizes.expert_parallel_size > 1) | (sizes.expert_tensor_parallel_size > 1)),
        "expert parallelism of a dense model",
    )
    p, v, layers = sizes.pipeline_parallel_size, sizes.virtual_pipeline_parallel_size, model.num_hidden_layers
    uneven = splits_unevenly(num_layers=layers, stages=p, chunks=v)
    yield (layers % (p * v) != 0) & (uneven == 0), f"num_hidden_layers {layers} in {p * v} unequal chunks"
    schedule = sizes.pipeline_schedule  # None or a name; of many candidates codes, 0 for None
    yield (schedule is not None) & (schedule != 0), f"pipeline_schedule: {schedule}"
    if training.framework == "torch-fsdp":
        yield zero < 2, f"zero_stage: {zero} under torch-fsdp"
        yield context, "context parallelism under torch-fsdp"
        tied = model.tie_word_embeddings
        yield (sizes.pipeline_parallel_size > 1) & tied, "a pipeline whose ends share their weight under torch-fsdp"
    else:
        yield zero > 1, f"zero_stage: {zero}"
        yield sizes.data_parallel_shard_size > 0, "hybrid sharding (data_parallel_shard_size)"
    yield model.vocab_size % t != 0, f"vocab_size {model.vocab_size}, which is not divisible by tensor_parallel_size {t}"
