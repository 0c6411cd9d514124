"""Values of Megatron-LM's flags, by query value (megatron/training/arguments.py, core 0.16)."""

from hp_tool.domain.declared import (
    BATCH_FIELDS,
    DENSE_FIELDS,
    EXPERT_FIELDS,
    OVERLAP_FIELDS,
    SPLIT_FIELDS,
    parse_names,
)

TOOL = "Megatron-LM"
Flags = dict[str, list[str]]
"""Values by flag name without dashes. A switch has an empty list."""

EXPRESSED_FIELDS = (
    DENSE_FIELDS | EXPERT_FIELDS | BATCH_FIELDS | SPLIT_FIELDS | OVERLAP_FIELDS
) | parse_names("""
    architecture query_key_norm attention_sinks num_nextn_predict_layers
    gradient_precision optimizer_precision exp_avg_sq_precision parameter_precision
    master_precision fp8_recipe attention dropout optimizer cross_entropy expert_capacity_factor
    cuda_graphs cuda_graph_modules offload offload_fraction kernel_fusion task
    context_parallel_communication hierarchical_context_parallel_sizes pipeline_layout
    moe_token_dispatcher_type data_parallel_shard_size rank_order
""")
"""Setup fields that these flags express. Those in LATENT are expressed only with MLA."""

PACKING_FIELDS = frozenset(
    {"dynamic_context_parallel", "sequence_lengths", "packed", "row_tokens", "row_squares"}
)
"""Fields that a packing scheduler takes into account. The sequence lengths are part of the data."""

PIPELINE_BEFORE_DATA = "tp-cp-ep-pp-dp"
"""Rank order under --use-tp-pp-dp-mapping."""
LAYOUT_FLAG = "pipeline-model-parallel-layout"
FIRST_STAGE, LAST_STAGE = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
WITH_EMBEDDING, WITH_LOSS = (
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
)
UNEVEN_STAGE_FLAGS = {FIRST_STAGE, LAST_STAGE, WITH_EMBEDDING, WITH_LOSS}
POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
PRECISIONS: dict[str, Flags] = {
    "fp32": {},
    "bf16": {"bf16": []},
    "fp16": {"fp16": []},
    "fp8": {"bf16": [], "fp8-format": ["hybrid"]},
    "mxfp8": {"bf16": [], "fp8-format": ["e4m3"], "fp8-recipe": ["mxfp8"]},
    "nvfp4": {"bf16": [], "fp4-format": ["e2m1"], "fp4-recipe": ["nvfp4"]},
}
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
CONTEXT = {name: (name,) for name in ("p2p", "a2a", "a2a+p2p")} | {
    "all_gather": ("all_gather", "allgather")
}
"""Values of --cp-comm-type: Transformer Engine's spelling first, then others in public scripts."""
ATTENTION = {"flash": "auto", "unfused": "unfused"}
"""`auto` lets Transformer Engine select a fused kernel. FlashAttention 2 does not support MLA's
head sizes 192 and 128.
"""
