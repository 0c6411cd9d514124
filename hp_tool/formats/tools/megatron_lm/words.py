"""Megatron-LM's words for ours; flags as in megatron/training/arguments.py of Megatron Core
0.16.
"""

TOOL = "Megatron-LM"
Flags = dict[str, list[str]]
"""Values behind each flag, without its dashes; a switch has none."""

SAID = {
    "architecture",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
    "gated_mlp",
    "normalization",
    "position_embedding",
    "attention_bias",
    "mlp_bias",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "num_shared_experts",
    "shared_expert_intermediate_size",
    "attention_output_bias",
    "query_key_norm",
    "first_k_dense_replace",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_nextn_predict_layers",
    "n_group",
    "topk_group",
    "sequence_length",
    "global_batch_size",
    "precision",
    "gradient_precision",
    "optimizer_precision",
    "exp_avg_sq_precision",
    "attention",
    "dropout",
    "optimizer",
    "cross_entropy",
    "expert_capacity_factor",
    "overlap",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
    "micro_batch_size",
    "sequence_parallel",
    "recompute",
    "zero_stage",
    "context_parallel_communication",
    "pipeline_layout",
    "fp8_recipe",
    "parameter_precision",
    "cuda_graphs",
    "moe_token_dispatcher_type",
    "hierarchical_context_parallel_sizes",
    "data_parallel_shard_size",
    "rank_order",
    "sliding_window",
    "sliding_window_layers",
    "attention_sinks",
    "shared_expert_gate",
    "offload",
    "offload_fraction",
    "master_precision",
    "kernel_fusion",
    "task",
    "cuda_graph_modules",
}
"""Fields of a setup that these flags express."""

PACKED = frozenset(
    {"dynamic_context_parallel", "sequence_lengths", "packed", "row_tokens", "row_squares"}
)
"""Fields that a packing scheduler stands for; the lengths themselves are the data's."""

PIPELINE_BEFORE_DATA = "tp-cp-ep-pp-dp"
"""Order of ranks that --use-tp-pp-dp-mapping makes."""
LAYOUT = "pipeline-model-parallel-layout"
FIRST_STAGE, LAST_STAGE = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
WITH_EMBEDDING, WITH_LOSS = (
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
)
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
"""Transformer Engine's words first, and after them what public scripts write, which it refuses."""
ATTENTION = {"flash": "auto", "unfused": "unfused"}
"""auto: Transformer Engine chooses a fused kernel that knows the heads; FlashAttention 2 knows none
of MLA's 192 and 128.
"""
