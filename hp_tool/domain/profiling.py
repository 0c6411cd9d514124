"""What the built-in profilers run, by name: searches check before they pay for runs, a profiler
before a run. What is not declared here is rejected.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, TypeAlias

from hp_tool.domain.declared import (
    ACCOUNTING,
    DENSE,
    EXPERTS,
    LATENT,
    OVERLAPS,
    RECOMPUTE,
    SERVER,
    SPLITS,
    Declared,
    any_value,
    names,
    setting,
    undeclared,
)
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.measurement import Runner
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ContextCommunication, ParallelConfig, Strategy
from hp_tool.domain.pipeline_layout import ends_are_shorter, splits_unevenly
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.workload import TrainingWorkload

Unsupported = Iterator[tuple[str, str]]
Sizes: TypeAlias = Any
"""A ParallelConfig, or the same fields of n candidates as arrays of shape (n,)."""
ENGINES = ("megatron-core", "torch-fsdp")
"""Frameworks that the profiler has an engine for."""
FEWEST_VLLM_TOKENS = 10_000
"""`vllm bench latency` draws its prompts from this many tokens."""

_OF_ENCODERS: Declared = {
    "output_bias": (False,),
    "head_dense": ("none",),
    "sentence_head": (False,),
    "type_vocab_size": (0,),
}
"""What a decoder may say that it lacks."""
_DECODER: Declared = {
    **any_value(DENSE, names("position_embedding_offset")),
    **_OF_ENCODERS,
    "position_embedding": ("learned", "rotary", "none"),
    "query_key_norm": ("head",),
}
_WITH_EXPERTS = {**_DECODER, **any_value(EXPERTS)}
_PREDICTING = {**_WITH_EXPERTS, **any_value(names("num_nextn_predict_layers"))}
_LLAMA: Declared = {
    **any_value(DENSE - names("sliding_window sliding_window_layers")),
    **_OF_ENCODERS,
    **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), (False,)),
    "query_key_norm": ("head",),
}
_WORKLOAD: Declared = {
    **any_value(names("sequence_length global_batch_size")),
    "optimizer": ("sgd",),
    "attention_kernel": ("auto",),
    "cross_entropy": ("unfused",),
    "cuda_graphs": (False,),
    "dispatch_precision": ("bf16",),
    "gated_product": ("kept",),
    "gradient_reduction": ("micro_batch",),
    "offload": ("none",),
    "offload_fraction": (1.0,),
    "parameter_precision": ("fp32",),
    "gradient_precision": ("fp32",),
    "optimizer_precision": ("fp32",),
    "exp_avg_sq_precision": ("fp32",),
    "master_precision": ("fp32",),
}
_SIZES = {
    "megatron-core": SPLITS
    | names("micro_batch_size zero_stage")
    | names("context_parallel_communication moe_token_dispatcher_type"),
    "torch-fsdp": names("""
        tensor_parallel_size sequence_parallel pipeline_parallel_size
        virtual_pipeline_parallel_size micro_batch_size zero_stage data_parallel_shard_size
    """),
}
"""Fields of `parallel` that each engine follows, beside recomputation."""
_COLUMNS = names("recompute_method recompute_num_layers recompute_modules")
"""Recomputation of many candidates."""
_BATCH = names("input_length output_length concurrency precision")
_ENDPOINT = _BATCH | names("""
    kv_cache_precision request_rate_per_second prefix_cache_hit_rate memory_fraction
""")
"""Of a load on a server that was started with its own precisions and share of memory."""


def _workload(training: TrainingWorkload) -> Declared:
    """Return what the engine follows of a workload."""
    if training.framework == "torch-fsdp":  # it casts what it gathers, and stores fp32
        return {**_WORKLOAD, "precision": ("fp32",)}
    stored = "bf16" if training.precision == "fp8" else training.precision
    return {
        **_WORKLOAD,
        **any_value(names("fp8_recipe attention dropout expert_capacity_factor")),
        # Transformer Engine's ring always overlaps.
        **any_value(OVERLAPS - {"overlap.context_parallel"}),
        "precision": ("fp16", "fp32", "fp8"),
        "parameter_precision": (stored,),
        "gradient_precision": ("fp32", stored),
        "optimizer_precision": ("fp32", "bf16"),
        "exp_avg_sq_precision": ("fp32", "bf16"),
        "cross_entropy": ("unfused", "fused", "in_place"),
        "cuda_graphs": (False, True),
    }


def _named(spec: Any, *, section: str, declared: Declared, where: str = "") -> Unsupported:
    for path, value in undeclared(spec, section=section, declared=declared):
        yield path, f"{setting(path, value)}{where}"


def unprofiled_model(
    model: ModelSpec, *, declared: Declared = _PREDICTING, sequence_length: int, of: str
) -> Unsupported:
    """(field, words) of what a model has and no run builds. `of`: the query's field that says how
    long sequences are.
    """
    if model.kv_lora_rank is not None and declared is _PREDICTING:
        declared = {**declared, **any_value(LATENT)}
    yield from _named(model, section="model", declared=declared)
    learned, rows = model.positions == "learned", model.max_position_embeddings or 0
    if model.kv_lora_rank is not None and model.positions != "rotary":
        yield "model.position_embedding", "latent attention without rotary positions"
    if model.num_experts and model.has_mlp_bias:
        yield "model.mlp_bias", "experts with biases (mlp_bias)"
    if learned and 0 < rows < sequence_length:
        yield of, f"a sequence_length above max_position_embeddings {rows}"
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
    fsdp = training.framework == "torch-fsdp"
    if training.framework not in ENGINES:
        yield "training.framework", f"framework: {training.framework}"
    yield from unprofiled_model(
        model,
        declared=_DECODER if fsdp else _PREDICTING,
        sequence_length=training.sequence_length,
        of="training.sequence_length",
    )
    yield from _named(
        training,
        section="training",
        declared=_workload(training),
        where=" under torch-fsdp" if fsdp else "",
    )
    if training.cuda_graphs and model.num_experts:
        yield "training.cuda_graphs", "cuda_graphs of a model with experts"
    if training.narrow_optimizer and gpu == "cpu":
        yield (
            "training.optimizer_precision",
            "optimizer states in 16 bits on a CPU, which has no Transformer Engine",
        )


def unprofiled_layout(cluster: ClusterSpec, strategy: Strategy) -> Unsupported:
    """(field, words) of what the layout of ranks and stages asks and is not run."""
    yield from _named(strategy, section="parallel", declared=any_value(_SIZES["megatron-core"]))
    yield from _named(cluster, section="cluster", declared={})


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
    yield from _undeclared_sizes(sizes, followed=_SIZES[_engine(training)])
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
    apart = training.overlap is not None and training.overlap.pipeline_parallel is False
    yield (
        apart & (v > 1) & (p == 2),
        "interleaving over two stages without overlap.pipeline_parallel",
    )
    if training.framework == "torch-fsdp":
        yield zero < 2, f"zero_stage: {zero} under torch-fsdp"
        yield (
            (p > 1) & model.tie_word_embeddings,
            "a pipeline whose ends share their weight under torch-fsdp",
        )
    else:
        yield zero > 1, f"zero_stage: {zero}"
    yield (
        model.vocab_size % t != 0,
        f"vocab_size {model.vocab_size}, which is not divisible by tensor_parallel_size {t}",
    )


def _engine(training: TrainingWorkload) -> str:
    return "torch-fsdp" if training.framework == "torch-fsdp" else "megatron-core"


def _undeclared_sizes(sizes: Sizes, *, followed: frozenset[str]) -> Iterator[tuple[Any, str]]:
    if isinstance(sizes, ParallelConfig):
        declared = any_value(followed, RECOMPUTE)
        for path, value in undeclared(sizes, section="parallel", declared=declared):
            yield True, setting(path, value)
        return
    usual = ParallelConfig()
    for name in (each.name for each in fields(sizes)):
        if name not in followed | _COLUMNS and f"parallel.{name}" not in ACCOUNTING:
            default = getattr(usual, name, None)  # of names the code 0
            yield getattr(sizes, name) != (0 if default is None else default), name


def unserved(*, model: ModelSpec, inference: InferenceWorkload, runner: Runner) -> Unsupported:
    """(field, words) of what no configuration of this query can be served with; nothing where all
    is well.
    """
    running = runner == "endpoint"
    by_rate = running and isinstance(inference.request_rate_per_second, int | float)
    if not running and inference.precision not in ("bf16", "fp16", "fp32"):
        yield "inference.precision", f"precision: {inference.precision}"
    if not by_rate and not isinstance(inference.concurrency, int):
        yield (
            "inference.concurrency",
            "a load without one concurrency" + (" or request rate" if running else ""),
        )
    if running and inference.think_time_s:  # the requests of such people in flight vary
        yield (
            "inference.think_time_s",
            "think_time_s: people who think come at a rate; measure that, request_rate_per_second",
        )
    declared: Declared = {
        **any_value(_ENDPOINT if running else _BATCH),
        "load.arrival": ("poisson",) if by_rate else (),
    }
    if not running:
        declared = {**declared, "kv_cache_precision": (inference.precision,)}
    yield from _named(inference, section="inference", declared=declared)
    length = inference.input_length + inference.output_length
    if runner == "megatron-core":
        yield from unprofiled_model(
            model, declared=_WITH_EXPERTS, sequence_length=length, of="inference.output_length"
        )
    if runner == "vllm":
        yield from _named(model, section="model", declared=_LLAMA, where=" with vllm")
        if not model.gated_mlp or model.normalization != "rmsnorm" or model.positions != "rotary":
            yield "model", "models shaped otherwise than Llama or Qwen3 with vllm"
        if model.vocab_size < FEWEST_VLLM_TOKENS:
            yield "model.vocab_size", f"a vocab_size below {FEWEST_VLLM_TOKENS} with vllm"


def unserved_sizes(
    *,
    model: ModelSpec,
    inference: InferenceWorkload,
    parallel: ServingConfig,
    runner: Runner = "megatron-core",
) -> Unsupported:
    """(field, words) of what this configuration asks for and no run does."""
    if runner == "endpoint":  # it was started so
        yield from _named(parallel, section="parallel", declared=any_value(SERVER))
        return
    followed = names("tensor_parallel_size max_num_seqs max_num_batched_tokens")
    yield from _named(parallel, section="parallel", declared=any_value(followed))
    t = parallel.tensor_parallel_size
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
