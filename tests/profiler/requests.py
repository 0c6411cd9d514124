"""Small requests that any machine runs in seconds."""

from __future__ import annotations

from typing import Any

from hp_tool.domain.measurement import ProfileRequest
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload

GPT: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}
LLAMA: dict[str, Any] = {
    **GPT,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "gated_mlp": True,
    "normalization": "rmsnorm",
    "tie_word_embeddings": False,
}


def request(
    *,
    model: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    **changes: Any,
) -> ProfileRequest:
    """Two measured steps of a four-layer model on CPU processes; num_gpus follows from `parallel`."""
    config = ParallelConfig(**(parallel or {}))
    return ProfileRequest(
        **{
            "run_id": "test",
            "model": ModelSpec(**{**GPT, **(model or {})}),
            "training": TrainingWorkload(
                **{"sequence_length": 32, "global_batch_size": 4, "precision": "fp32", **(training or {})},
            ),
            "parallel": config,
            "num_gpus": config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size,
            "gpu": "cpu",
            "steps": 2,
            "warmup_steps": 1,
            "timeout_s": 120.0,
            **changes,
        }
    )
