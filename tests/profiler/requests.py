"""Small requests that any machine runs in seconds."""

from __future__ import annotations

from typing import Any

from hp_tool.domain.measurement import ProfileRequest
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload

GPT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
LLAMA: dict[str, Any] = {
    **GPT,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "gated_mlp": True,
    "normalization": "rmsnorm",
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {
    **LLAMA,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
LATENT: dict[str, Any] = {
    **LLAMA,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
DEEPSEEK: dict[str, Any] = {
    **LATENT,
    **{name: MOE[name] for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")},
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}


def request(
    *,
    model: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    **changes: Any,
) -> ProfileRequest:
    """Two measured steps of a four-layer model on CPU processes; num_gpus follows from
    `parallel`.
    """
    config = ParallelConfig(**(parallel or {}))
    return ProfileRequest(
        **{
            "run_id": "test",
            "model": ModelSpec(**{**GPT, **(model or {})}),
            "training": TrainingWorkload(
                **{
                    "sequence_length": 32,
                    "global_batch_size": 4,
                    "precision": "fp32",
                    **(training or {}),
                },
            ),
            "parallel": config,
            "num_gpus": config.tensor_parallel_size
            * config.pipeline_parallel_size
            * config.context_parallel_size
            * config.data_parallel_size,
            "gpu": "cpu",
            "steps": 2,
            "warmup_steps": 1,
            "timeout_s": 1200.0,
            **changes,
        }
    )
