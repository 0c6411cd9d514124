"""What the built-in profiler cannot run, by name; searches check before they pay for runs, the
profiler before a run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

from hp_tool.domain.hardware import DEFAULT_RANK_ORDER, ClusterSpec
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.measurement import Runner
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ContextCommunication, Strategy
from hp_tool.domain.pipeline_layout import ends_are_shorter, splits_unevenly
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload

Unsupported = Iterator[tuple[str, str]]
Sizes: TypeAlias = Any
"""A ParallelConfig, or the same fields of n candidates as arrays of shape (n,)."""
ENGINES = ("megatron-core", "torch-fsdp")
"""Frameworks that the profiler has an engine for."""

_FP32 = (None, "fp32")
_USUAL_MODEL: dict[str, tuple[Any, ...]] = {
    "architecture": ("decoder",),
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
    "index_topk": (None,),
    "moe_latent_size": (None,),
    "values_are_keys": (False,),
    "attention_output_gate": (None,),
}
"""What a model's details may be in a run."""
_USUAL_TRAINING: dict[str, tuple[Any, ...]] = {
    "framework": ENGINES,
    "precision": ("bf16", "fp16", "fp32", "fp8"),
    "cross_entropy": (None, "unfused", "fused", "in_place"),
    "attention_kernel": (None, "auto"),
    "offload": (None, "none"),
    "offload_fraction": (None, 1.0),
    "cuda_graph_modules": (None,),
    "expert_precision": (None,),
    "dispatch_precision": (None, "bf16"),
    "gradient_reduction": (None, "micro_batch"),
    "gated_product": (None, "kept"),
    "kernel_fusion": (True,),
    "optimizer": ("adam", "sgd"),
    "optimizer_precision": (*_FP32, "bf16"),
    "exp_avg_sq_precision": (*_FP32, "bf16"),
    "master_precision": _FP32,
}
"""What a workload may say in a run."""
_USUAL_FSDP: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16", "fp32"),
    "attention": ("flash",),
    "cross_entropy": (None, "unfused"),
    "gradient_precision": _FP32,
    "optimizer_precision": _FP32,
    "exp_avg_sq_precision": _FP32,
}
"""What it may say under the plain-torch engine, which lacks some of what Megatron Core runs."""
_SERVED = (
    "input_length",
    "output_length",
    "concurrency",
    "engine",
    "engine_version",
    "load",
    "precision",
    "kv_cache_precision",
)
"""Fields of a serving load that a run follows, or that `unserved` looks at; any other must be left
at its default.
"""


def _unusual(
    spec: Any, usual: Mapping[str, Sequence[Any]], *, of: str, where: str = ""
) -> Unsupported:
    """Fields of `spec` with another value than the usual ones."""
    for name, values in usual.items():
        if getattr(spec, name) not in values:
            yield f"{of}.{name}", f"{name}: {getattr(spec, name)}{where}"


def unprofiled_model(model: ModelSpec, *, sequence_length: int, of: str) -> Unsupported:
    """(field, words) of what a model has and no run builds. `of`: the query's field that says how
    long sequences are.
    """
    yield from _unusual(model, _USUAL_MODEL, of="model")
    if not model.is_uniform:
        yield "model.blocks", "layers that are not all attention and MLP (blocks)"
    learned, rows = model.positions == "learned", model.max_position_embeddings or 0
    if model.kv_lora_rank is not None and model.positions != "rotary":
        yield "model.position_embedding", "latent attention without rotary positions"
    if model.num_experts and model.has_mlp_bias:
        yield "model.mlp_bias", "experts with biases (mlp_bias)"
    if learned and 0 < rows < sequence_length:
        yield of, f"a sequence_length above max_position_embeddings {rows}"
    if model.positions == "relative":
        yield "model.position_embedding", "position_embedding: relative"
    if model.has_mlp_bias and not model.has_attention_bias:
        yield "model.mlp_bias", "mlp_bias without attention_bias"
    if model.attention_output_bias not in (None, model.has_mlp_bias):
        yield "model.attention_output_bias", "an attention_output_bias other than mlp_bias"
    if (model.sliding_window or sequence_length) < sequence_length:
        yield "model.sliding_window", "a sliding_window shorter than sequence_length"


def unprofiled(*, model: ModelSpec, training: TrainingWorkload, gpu: str) -> Unsupported:
    """(field, words) of what no configuration of this query can be run with; nothing where all is
    well.
    """
    yield from unprofiled_model(
        model, sequence_length=training.sequence_length, of="training.sequence_length"
    )
    yield from _unusual(training, _USUAL_TRAINING, of="training")
    fsdp, narrow = training.framework == "torch-fsdp", training.precision == "fp8"
    # FSDP casts what it gathers, Megatron keeps a master copy besides.
    stored = "fp32" if fsdp else "bf16" if narrow else training.precision
    gradients = "bf16" if narrow else training.precision
    formats = {
        "parameter_precision": (None, stored),
        "gradient_precision": (None, "fp32", gradients),
    }
    yield from _unusual(
        training, formats, of="training", where=f" with precision {training.precision}"
    )
    if training.frozen:
        yield "training.frozen", "frozen parts"
    if training.task != "pretrain" or training.lora is not None:
        yield "training.task", f"task: {training.task}"
    overlap = training.overlap or OverlapSpec()
    if overlap.context_parallel is not None:  # Transformer Engine's ring always overlaps
        yield "training.overlap.context_parallel", "a switch for overlap.context_parallel"
    if training.narrow_optimizer and gpu == "cpu":
        yield (
            "training.optimizer_precision",
            "optimizer states in 16 bits on a CPU, which has no Transformer Engine",
        )
    if training.cuda_graphs and model.num_experts:
        yield "training.cuda_graphs", "cuda_graphs of a model with experts"
    if training.packed or training.sequence_lengths is not None:
        yield (
            "training.packed" if training.packed else "training.sequence_lengths",
            "packed or unequal sequences",
        )
    if fsdp:
        yield from _unusual(training, _USUAL_FSDP, of="training", where=" under torch-fsdp")
        if model.num_experts is not None:
            yield "model.num_experts", "mixture-of-experts models (num_experts) under torch-fsdp"
        if model.kv_lora_rank is not None:
            yield "model.kv_lora_rank", "latent attention (kv_lora_rank) under torch-fsdp"
        if training.dropout > 0.0:
            yield "training.dropout", "dropout under torch-fsdp"
        if model.num_nextn_predict_layers > 0:
            yield (
                "model.num_nextn_predict_layers",
                "multi-token prediction (num_nextn_predict_layers) under torch-fsdp",
            )
        if training.overlap is not None:
            yield "training.overlap", "overlap under torch-fsdp"
        if training.cuda_graphs:
            yield "training.cuda_graphs", "cuda_graphs under torch-fsdp"


def unprofiled_layout(cluster: ClusterSpec, strategy: Strategy) -> Unsupported:
    """(field, words) of what the layout of ranks and stages asks and is not run."""
    if strategy.pipeline_layout is not None:
        yield "parallel.pipeline_layout", f"pipeline_layout: {strategy.pipeline_layout.text}"
    if cluster.kinds:
        yield "cluster.stages", "two kinds of GPU (stages)"
    if cluster.rank_order != DEFAULT_RANK_ORDER:
        yield "parallel.rank_order", f"rank_order: {cluster.rank_order}"


def unprofiled_sizes(
    sizes: Sizes,
    *,
    model: ModelSpec,
    training: TrainingWorkload,
    gpu: str,
    communication: ContextCommunication | None,
) -> Iterator[tuple[Any, str]]:
    """(whether it is so, words) for each thing a configuration may ask that is not run; bools, or
    arrays of shape (n,).

    communication: of context parallelism. Rings and head exchanges are Transformer Engine's, which
    has no CPU version.
    """
    t, zero = sizes.tensor_parallel_size, sizes.zero_stage
    context = sizes.context_parallel_size > 1
    by_engine = gpu == "cpu" and communication != "all_gather"
    yield (
        context & by_engine,
        f"context parallelism by {communication or 'p2p'} on a CPU; all_gather is run",
    )
    yield context & (communication == "a2a+p2p"), "context parallelism by a2a+p2p"
    yield context & (training.attention == "unfused"), "context parallelism with unfused attention"
    experts = (sizes.expert_parallel_size > 1) | (sizes.expert_tensor_parallel_size > 1)
    yield (model.num_experts is None) & experts, "expert parallelism of a dense model"
    p, v, layers = (
        sizes.pipeline_parallel_size,
        sizes.virtual_pipeline_parallel_size,
        model.num_hidden_layers,
    )
    split = {"num_layers": layers, "stages": p, "chunks": v}
    uneven = splits_unevenly(**split) & ends_are_shorter(**split, begins_dense=model.begins_dense)
    yield (
        (layers % (p * v) != 0) & (uneven == 0),
        f"num_hidden_layers {layers} in {p * v} unequal chunks",
    )
    schedule = sizes.pipeline_schedule  # None or a name; of many candidates codes, 0 for None
    yield (schedule is not None) & (schedule != 0), f"pipeline_schedule: {schedule}"
    apart = training.overlap is not None and training.overlap.pipeline_parallel is False
    yield (
        apart & (v > 1) & (p == 2),
        "interleaving over two stages without overlap.pipeline_parallel",
    )
    if training.framework == "torch-fsdp":
        yield zero < 2, f"zero_stage: {zero} under torch-fsdp"
        yield context, "context parallelism under torch-fsdp"
        yield (
            (p > 1) & model.tie_word_embeddings,
            "a pipeline whose ends share their weight under torch-fsdp",
        )
    else:
        yield zero > 1, f"zero_stage: {zero}"
        yield sizes.data_parallel_shard_size > 0, "hybrid sharding (data_parallel_shard_size)"
    yield (
        model.vocab_size % t != 0,
        f"vocab_size {model.vocab_size}, which is not divisible by tensor_parallel_size {t}",
    )


def unserved(*, model: ModelSpec, inference: InferenceWorkload, runner: Runner) -> Unsupported:
    """(field, words) of what no configuration of this query can be served with; nothing where all
    is well.
    """
    load, precision, running = inference.load, inference.precision, runner == "endpoint"
    by_rate = running and isinstance(inference.request_rate_per_second, int | float)
    if not running:
        yield from _unusual(inference, {"precision": ("bf16", "fp16", "fp32")}, of="inference")
    if not running and inference.kv_cache_precision not in (None, precision):
        yield "inference.kv_cache_precision", "a kv_cache_precision other than precision"
    if not by_rate and not isinstance(inference.concurrency, int):
        yield (
            "inference.concurrency",
            "a load without one concurrency" + (" or request rate" if running else ""),
        )
    if load is not None and load.arrival not in ("closed", "poisson" if by_rate else "closed"):
        yield "inference.load", f"arrival: {load.arrival}"
    if running and inference.think_time_s:
        # Of people who think the requests in flight are no fixed number, which is what
        # `concurrency` keeps.
        yield (
            "inference.think_time_s",
            "think_time_s: people who think come at a rate; measure that, request_rate_per_second",
        )
    # An endpoint was started with its own share of memory: the query states it for the prediction.
    followed = (
        (*_SERVED, "request_rate_per_second", "prefix_cache_hit_rate", "memory_fraction")
        if running
        else _SERVED
    )
    defaults = {
        each.name: (each.default,) for each in fields(inference) if each.name not in followed
    }
    yield from _unusual(inference, defaults, of="inference")
    if runner == "megatron-core":
        length = inference.input_length + inference.output_length
        if model.kv_lora_rank is not None:
            yield "model.kv_lora_rank", "multi-head latent attention (kv_lora_rank)"
        if model.num_nextn_predict_layers > 0:
            yield (
                "model.num_nextn_predict_layers",
                "multi-token prediction (num_nextn_predict_layers)",
            )
        yield from unprofiled_model(model, sequence_length=length, of="inference.output_length")


def unserved_sizes(
    *, model: ModelSpec, inference: InferenceWorkload, parallel: ServingConfig
) -> Unsupported:
    """(field, words) of what this configuration asks for and no run does."""
    t = parallel.tensor_parallel_size
    alone = (
        "pipeline_parallel_size",
        "expert_parallel_size",
        "attention_data_parallel_size",
        "data_parallel_size",
    )
    yield from _unusual(parallel, dict.fromkeys(alone, (1,)), of="parallel")
    for count, name in (
        (model.num_attention_heads, "num_attention_heads"),
        (model.kv_heads, "num_key_value_heads"),
        (model.vocab_size, "vocab_size"),
        (model.ffn_size, "intermediate_size"),
    ):
        if count % t:
            yield (
                f"model.{name}",
                f"{name} {count}, which is not divisible by tensor_parallel_size {t}",
            )
    if isinstance(inference.concurrency, int) and inference.concurrency > parallel.max_num_seqs:
        yield (
            "parallel.max_num_seqs",
            f"a concurrency above max_num_seqs {parallel.max_num_seqs}: a run has no queue",
        )
