"""What nanotron does not have, or no run of it told us: refused by name, never answered with another framework's figures."""

from __future__ import annotations

from typing import Any

from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import UnsupportedError

_ALLOWED_TRAINING: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16",),
    "parameter_precision": (None, "bf16"),
    "gradient_precision": (None, "fp32"),
    "optimizer_precision": (None, "fp32"),
    "exp_avg_sq_precision": (None,),
    "master_precision": (None, "fp32"),
    "optimizer": ("adam",),
    "attention": ("flash",),
    "cross_entropy": ("unfused",),
    "dropout": (0.0,),
    "task": ("pretrain", "sft"),
    "offload": (None, "none"),
}
_ALLOWED_PARALLEL: dict[str, tuple[Any, ...]] = {
    "virtual_pipeline_parallel_size": (None, 1),
    "pipeline_schedule": (None, "1f1b"),
    "context_parallel_size": (None, 1),
    "expert_parallel_size": (None, 1),
    "expert_tensor_parallel_size": (None, 1),
    "data_parallel_shard_size": (None, 0),
    "recompute": (None, "none", "full"),
}


def check_nanotron(model: ModelSpec, workload: TrainingWorkload, parallel: ParallelQuery) -> None:
    """Raises UnsupportedError, which names the field and what may stand there."""
    if model.architecture != "decoder" or model.num_experts or model.kv_lora_rank or model.num_nextn_predict_layers:
        raise UnsupportedError(
            f"{model.name}: with framework nanotron dense decoders are modelled; experts, latent attention and multi-token "
            "prediction are not",
            field="model",
        )
    for noun, allowed in ((workload, _ALLOWED_TRAINING), (parallel, _ALLOWED_PARALLEL)):
        place = "training" if noun is workload else "parallel"
        for name, values in allowed.items():
            asked = getattr(noun, name)
            for value in asked if isinstance(asked, tuple) else (asked,):
                if value not in values:
                    known = " or ".join(str(v) for v in values if v is not None) or "nothing"
                    raise UnsupportedError(
                        f"{place}.{name} {value} is not modelled for framework nanotron; choose {known}",
                        field=f"{place}.{name}",
                    )
