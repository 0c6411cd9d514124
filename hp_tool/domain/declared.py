"""Find configuration fields that a consumer does not support.

A consumer (a profiler, or an exporter to another tool's format) declares the fields that it
supports. `undeclared_fields` compares these with all fields of the dataclass. A field that is not
declared, such as a new one, is rejected by name unless it has its default value.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeAlias

from hp_tool.domain.fields import Strict

Declared: TypeAlias = Mapping[str, Collection[Any] | None]
"""Supported values other than the default, by field name within the section, such as `precision` or
`overlap.data_parallel`; None: all values.
"""


def parse_names(text: str) -> frozenset[str]:
    """Return the whitespace-separated names in a text."""
    return frozenset(text.split())


ACCOUNTING_FIELDS = parse_names("""
    model.name model.left_out model.tower_parameters model.tower_replicated
    model.tower_working_bytes model.bidirectional_item_tokens model.assistant_parameters
    training.framework training.framework_version training.total_tokens training.reliability
    training.attention_mask_flops training.expert_imbalance
    parallel.data_parallel_size
    inference.engine inference.engine_version
    cluster.name cluster.gpu cluster.num_gpus cluster.gpus_per_node cluster.node_gpus
    cluster.nvlink_domain_size cluster.nvlink_segment_gpus cluster.domain_gpus
    cluster.inter_node_bandwidth_bytes_per_second cluster.inter_node_latency_s
    cluster.network_topology cluster.nodes_per_leaf cluster.network_oversubscription
    cluster.price_per_gpu_hour cluster.interruptions_per_node_day
    cluster.grid_carbon_kg_per_kwh cluster.power_usage_effectiveness
""")
"""Paths of fields that consumers need not support. They describe what a run cannot choose
(machines, vision towers, expert load), affect only totals (tokens, prices, failures), or follow
from other fields. Consumers for a single framework or engine check the framework or engine
separately.
"""

DENSE_FIELDS = parse_names("""
    num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim
    intermediate_size vocab_size tie_word_embeddings gated_mlp normalization position_embedding
    max_position_embeddings sliding_window sliding_window_layers attention_bias
    attention_output_bias mlp_bias
""")
"""Model fields of a decoder with identical dense layers."""
EXPERT_FIELDS = parse_names("""
    num_experts num_experts_per_tok moe_intermediate_size num_shared_experts
    shared_expert_intermediate_size shared_expert_gate n_group topk_group first_k_dense_replace
""")
LATENT_FIELDS = parse_names("kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim")
"""Fields of multi-head latent attention."""
OVERLAP_FIELDS = parse_names("""
    overlap.tensor_parallel overlap.context_parallel overlap.expert_parallel
    overlap.pipeline_parallel overlap.data_parallel
""")
LORA_FIELDS = parse_names("lora.rank lora.target_modules lora.dropout")
RECOMPUTE_FIELDS = parse_names("""
    recompute recompute.granularity recompute.method recompute.num_layers recompute.modules
""")
BATCH_FIELDS = (
    parse_names("sequence_length global_batch_size precision micro_batch_size zero_stage")
    | RECOMPUTE_FIELDS
)
"""Fields that every training tool can set."""
SPLIT_FIELDS = parse_names("""
    tensor_parallel_size sequence_parallel pipeline_parallel_size virtual_pipeline_parallel_size
    context_parallel_size expert_parallel_size expert_tensor_parallel_size
""")
"""Degrees of `parallel` that split a model."""
BLOCK_FIELDS = parse_names("blocks.count blocks.mixer blocks.feed_forward")
"""Fields of hybrid models whose layers differ only in token mixer and FFN."""
LOAD_FIELDS = parse_names("""
    input_length output_length trace concurrency request_rate_per_second think_time_s
    prefix_cache_hit_rate prefix_groups expert_imbalance
    load.arrival load.num_prompts load.client load.warmup
""")
"""Fields that describe the requests to a server."""
SERVER_FIELDS = parse_names("""
    tensor_parallel_size pipeline_parallel_size expert_parallel_size attention_data_parallel_size
    redundant_experts max_num_seqs max_num_batched_tokens
""")
"""Fields of a serving configuration."""


QUERY_PATHS = {"cluster.kinds": "cluster.stages", "cluster.rank_order": "parallel.rank_order"}
"""Query paths of fields that have another path in a resolved case."""


def allow_any_value(*groups: Collection[str]) -> Declared:
    """Declare the fields in these groups as supported with any value."""
    return {name: None for group in groups for name in group}


def undeclared_fields(
    spec: Any, *, section: str, declared: Declared, within: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each unsupported field.

    A field is unsupported if its value is neither the default nor declared, and it is not in
    ACCOUNTING_FIELDS. Fields of nested specifications, such as `overlap`, are declared one by one.
    A nested specification without any declared field is rejected as a whole.
    """
    for field in fields(spec):
        name, value = f"{within}{field.name}", getattr(spec, field.name)
        path = f"{section}.{name}"
        if path in ACCOUNTING_FIELDS or value == default_of(field):
            continue
        values = value if isinstance(value, tuple) else (value,)
        specs = [each for each in values if isinstance(each, Strict)]
        if specs and any(each.startswith(f"{name}.") for each in declared):
            for each in specs:
                yield from undeclared_fields(
                    each, section=section, declared=declared, within=f"{name}."
                )
            continue
        followed = declared.get(name, ())
        if followed is not None and value not in followed:
            yield QUERY_PATHS.get(path, path), value


def setting_words(path: str, value: Any) -> str:
    """Return `training.precision: fp8`, or only the path if the value is a nested specification."""
    return f"{path}: {value}" if isinstance(value, str | int | float) else path


def default_of(field: Field[Any]) -> Any:
    """Return a field's default, or MISSING if the field is required."""
    return field.default if field.default_factory is MISSING else field.default_factory()
