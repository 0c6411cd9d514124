"""Fields that the built-in profilers support. A search checks them before its first run, and a
profiler before each run. Undeclared fields are rejected.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, TypeAlias

from hp_tool.domain.declared import (
    ACCOUNTING_FIELDS,
    DENSE_FIELDS,
    EXPERT_FIELDS,
    LATENT_FIELDS,
    OVERLAP_FIELDS,
    RECOMPUTE_FIELDS,
    SERVER_FIELDS,
    SPLIT_FIELDS,
    Declared,
    allow_any_value,
    parse_names,
    setting_words,
    undeclared_fields,
)
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.knobs import ENGINES, run_by
from hp_tool.domain.measurement import Runner
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ContextCommunication, ParallelConfig, Strategy
from hp_tool.domain.pipeline_layout import ends_are_shorter, splits_unevenly
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.workload import TrainingWorkload

Unsupported = Iterator[tuple[str, str]]
Sizes: TypeAlias = Any
"""A ParallelConfig, or the same fields of n candidates as arrays of shape (n,)."""
MIN_VLLM_BATCHED_TOKENS = 10_000
"""`vllm bench latency` draws its prompts from this many token ids."""

_ENCODER_ONLY_FIELDS: Declared = {
    "output_bias": (False,),
    "head_dense": ("none",),
    "sentence_head": (False,),
    "type_vocab_size": (0,),
}
"""Fields of encoder-only parts, with the values that a decoder may have."""
_DECODER_FIELDS: Declared = {
    **allow_any_value(DENSE_FIELDS, parse_names("position_embedding_offset")),
    **_ENCODER_ONLY_FIELDS,
    "position_embedding": ("learned", "rotary", "none"),
    "query_key_norm": ("head",),
}
_EXPERT_DECODER_FIELDS = {**_DECODER_FIELDS, **allow_any_value(EXPERT_FIELDS)}
_PREDICTING_DECODER_FIELDS = {
    **_EXPERT_DECODER_FIELDS,
    **allow_any_value(parse_names("num_nextn_predict_layers")),
}
_LLAMA_FIELDS: Declared = {
    **allow_any_value(DENSE_FIELDS - parse_names("sliding_window sliding_window_layers")),
    **_ENCODER_ONLY_FIELDS,
    **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), (False,)),
    "query_key_norm": ("head",),
}
_SIZE_FIELDS = {
    "megatron-core": SPLIT_FIELDS
    | parse_names("micro_batch_size zero_stage")
    | parse_names("context_parallel_communication moe_token_dispatcher_type"),
    "torch-fsdp": parse_names("""
        tensor_parallel_size sequence_parallel pipeline_parallel_size
        virtual_pipeline_parallel_size micro_batch_size zero_stage data_parallel_shard_size
    """),
}
"""Fields of `parallel` that each engine supports, besides recomputation."""
_RECOMPUTE_COLUMNS = parse_names("recompute_method recompute_num_layers recompute_modules")
"""Fields of the recomputation of many candidates, as columns."""
_BATCH_FIELDS = parse_names("input_length output_length concurrency precision")
_ENDPOINT_FIELDS = _BATCH_FIELDS | parse_names("""
    kv_cache_precision request_rate_per_second prefix_cache_hit_rate memory_fraction max_model_len
""")
"""Fields of a load that a running server supports. The server was started with its own precisions,
memory fraction and maximum request length.
"""


def _declared_workload(training: TrainingWorkload) -> Declared:
    """Return the supported fields of the workload, for its engine."""
    declared = run_by(_profiler_engine(training))
    if training.framework == "torch-fsdp":
        return declared
    stored = "bf16" if training.precision == "fp8" else training.precision
    return {
        **declared,
        # Transformer Engine's ring attention always overlaps.
        **allow_any_value(OVERLAP_FIELDS - {"overlap.context_parallel"}),
        "parameter_precision": (stored,),
        "gradient_precision": ("fp32", stored),
    }


def _undeclared_words(
    spec: Any, *, section: str, declared: Declared, where: str = ""
) -> Unsupported:
    for path, value in undeclared_fields(spec, section=section, declared=declared):
        yield path, f"{setting_words(path, value)}{where}"


def unsupported_model_fields(
    model: ModelSpec,
    *,
    declared: Declared = _PREDICTING_DECODER_FIELDS,
    sequence_length: int,
    of: str,
) -> Unsupported:
    """Yield (field, words) for each model feature that profile runs cannot build.

    `of` is the query field that gives the sequence length.
    """
    if model.kv_lora_rank is not None and declared is _PREDICTING_DECODER_FIELDS:
        declared = {**declared, **allow_any_value(LATENT_FIELDS)}
    yield from _undeclared_words(model, section="model", declared=declared)
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


def unsupported_training(*, model: ModelSpec, training: TrainingWorkload, gpu: str) -> Unsupported:
    """Yield (field, words) for each setting of a query that the profiler does not support."""
    fsdp = training.framework == "torch-fsdp"
    if training.framework not in ENGINES:
        yield "training.framework", f"framework: {training.framework}"
    yield from unsupported_model_fields(
        model,
        declared=_DECODER_FIELDS if fsdp else _PREDICTING_DECODER_FIELDS,
        sequence_length=training.sequence_length,
        of="training.sequence_length",
    )
    yield from _undeclared_words(
        training,
        section="training",
        declared=_declared_workload(training),
        where=" under torch-fsdp" if fsdp else "",
    )
    if training.cuda_graphs and model.num_experts:
        yield "training.cuda_graphs", "cuda_graphs of a model with experts"
    if training.narrow_optimizer and gpu == "cpu":
        yield (
            "training.optimizer_precision",
            "optimizer states in 16 bits on a CPU, which has no Transformer Engine",
        )


def unsupported_layout(cluster: ClusterSpec, strategy: Strategy) -> Unsupported:
    """Yield (field, words) for each setting of cluster and rank layout that profile runs do not
    support.
    """
    yield from _undeclared_words(
        strategy, section="parallel", declared=allow_any_value(_SIZE_FIELDS["megatron-core"])
    )
    yield from _undeclared_words(cluster, section="cluster", declared={})


def unsupported_sizes(
    sizes: Sizes,
    *,
    model: ModelSpec,
    training: TrainingWorkload,
    gpu: str,
    communication: ContextCommunication | None,
) -> Iterator[tuple[Any, str]]:
    """Yield (whether it applies, words) for each setting of a configuration that profile runs do
    not support. The first item is a bool, or an array of shape (n,).

    `communication` is the context exchange. Ring attention and Ulysses come from Transformer
    Engine, which has no CPU version.
    """
    yield from _undeclared_sizes(sizes, followed=_SIZE_FIELDS[_profiler_engine(training)])
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


def _profiler_engine(training: TrainingWorkload) -> str:
    return "torch-fsdp" if training.framework == "torch-fsdp" else "megatron-core"


def _undeclared_sizes(sizes: Sizes, *, followed: frozenset[str]) -> Iterator[tuple[Any, str]]:
    if isinstance(sizes, ParallelConfig):
        declared = allow_any_value(followed, RECOMPUTE_FIELDS)
        for path, value in undeclared_fields(sizes, section="parallel", declared=declared):
            yield True, setting_words(path, value)
        return
    usual = ParallelConfig()
    for name in (field.name for field in fields(sizes)):
        if (
            name not in followed | _RECOMPUTE_COLUMNS
            and f"parallel.{name}" not in ACCOUNTING_FIELDS
        ):
            default = getattr(usual, name, None)  # For names, this is the code 0.
            yield getattr(sizes, name) != (0 if default is None else default), name


def unsupported_serving(
    *, model: ModelSpec, inference: InferenceWorkload, runner: Runner
) -> Unsupported:
    """Yield (field, words) for each setting of a serving query that profile runs do not support."""
    running = runner == "endpoint"
    by_rate = running and isinstance(inference.request_rate_per_second, int | float)
    if not running and inference.precision not in ("bf16", "fp16", "fp32"):
        yield "inference.precision", f"precision: {inference.precision}"
    if not by_rate and not isinstance(inference.concurrency, int):
        yield (
            "inference.concurrency",
            "a load without one concurrency" + (" or request rate" if running else ""),
        )
    if running and inference.think_time_s:  # Then requests in flight vary.
        yield (
            "inference.think_time_s",
            "think_time_s: users with think time send requests at a rate; set "
            "request_rate_per_second instead",
        )
    declared: Declared = {
        **allow_any_value(_ENDPOINT_FIELDS if running else _BATCH_FIELDS),
        "load.arrival": ("poisson",) if by_rate else (),
    }
    if not running:
        declared = {**declared, "kv_cache_precision": (inference.precision,)}
    if runner == "vllm":
        declared = {**declared, "max_model_len": None}
    yield from _undeclared_words(inference, section="inference", declared=declared)
    length = inference.input_length + inference.output_length
    if runner == "megatron-core":
        yield from unsupported_model_fields(
            model,
            declared=_EXPERT_DECODER_FIELDS,
            sequence_length=length,
            of="inference.output_length",
        )
    if runner == "vllm":
        yield from _undeclared_words(
            model, section="model", declared=_LLAMA_FIELDS, where=" with vllm"
        )
        if not model.gated_mlp or model.normalization != "rmsnorm" or model.positions != "rotary":
            yield "model", "models other than Llama and Qwen3 shapes with vllm"
        if model.vocab_size < MIN_VLLM_BATCHED_TOKENS:
            yield "model.vocab_size", f"a vocab_size below {MIN_VLLM_BATCHED_TOKENS} with vllm"


def unsupported_serving_sizes(
    *,
    model: ModelSpec,
    inference: InferenceWorkload,
    parallel: ServingConfig,
    runner: Runner = "megatron-core",
) -> Unsupported:
    """Yield (field, words) for each setting of this configuration that profile runs do not
    support.
    """
    if runner == "endpoint":  # The server already runs with this configuration.
        yield from _undeclared_words(
            parallel, section="parallel", declared=allow_any_value(SERVER_FIELDS)
        )
        return
    followed = parse_names("tensor_parallel_size max_num_seqs max_num_batched_tokens")
    yield from _undeclared_words(parallel, section="parallel", declared=allow_any_value(followed))
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
            f"a concurrency above max_num_seqs {parallel.max_num_seqs}, because a run has no queue",
        )
