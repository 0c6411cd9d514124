"""The same flags as the YAML file of Megatron-LM's --yaml-cfg, to lay over its examples/gpt3/gpt_config.yaml.

That file must hold every argument, so what stands here replaces its keys: those of TransformerConfig under `language_model`,
those of ModelParallelConfig under `model_parallel`, all others beside them.
"""

from __future__ import annotations

from typing import Any

from hp_tool.formats.megatron_lm.words import FIRST_STAGE, LAST_STAGE, TOOL, WITH_EMBEDDING, WITH_LOSS
from hp_tool.formats.megatron_lm.write import flags
from hp_tool.formats.setup import TrainingSetup, headline

_LANGUAGE_MODEL = {
    "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels", "num-query-groups", "normalization",
    "attention-dropout", "hidden-dropout", "recompute-granularity", "recompute-method", "recompute-num-layers",
    "recompute-modules", "num-experts", "moe-router-topk", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size",
    "moe-router-num-groups", "moe-router-group-topk", "moe-layer-freq", "moe-token-dispatcher-type", "moe-grouped-gemm",
    "moe-expert-capacity-factor", "add-qkv-bias",
    "qk-layernorm", "fp8-format", "fp8-recipe", "fp4-format", "fp4-recipe", "attention-backend",
    "multi-latent-attention", "kv-lora-rank", "q-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim",
    "mtp-num-layers", "cp-comm-type", WITH_EMBEDDING, WITH_LOSS, FIRST_STAGE, LAST_STAGE,
}  # fmt: skip
_MODEL_PARALLEL = {
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
    "expert-model-parallel-size", "expert-tensor-parallel-size", "sequence-parallel", "bf16", "fp16", "tp-comm-overlap",
    "overlap-moe-expert-parallel-comm", "cross-entropy-loss-fusion", "num-virtual-stages-per-pipeline-rank",
}  # fmt: skip
_KEYS = {
    "num-experts": "num_moe_experts",
    "fp8-format": "fp8",
    "fp4-format": "fp4",
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    FIRST_STAGE: "num_layers_in_first_pipeline_stage",
    LAST_STAGE: "num_layers_in_last_pipeline_stage",
}
"""Where the file's key is not the flag's name."""
_LISTS = {"recompute-modules"}


def content(setup: TrainingSetup) -> dict[str, Any]:
    """The keys and values that the configuration decides. Raises UnsupportedError for what Megatron-LM cannot say."""
    given = flags(setup)
    gated = "swiglu" in given
    language: dict[str, Any] = {
        "add_bias_linear": "disable-bias-linear" not in given,
        "gated_linear_unit": gated,
        "activation_func": "swiglu" if gated else "gelu",
    }
    parallel: dict[str, Any] = {"overlap_p2p_comm": "no-overlap-p2p-communication" not in given}
    others: dict[str, Any] = {}
    for name, values in given.items():
        if name in ("disable-bias-linear", "no-overlap-p2p-communication"):
            continue
        section = language if name in _LANGUAGE_MODEL else parallel if name in _MODEL_PARALLEL else others
        section[_KEYS.get(name, name.replace("-", "_"))] = _value(name, values)
    return {"language_model": language, "model_parallel": parallel, **others}


def _value(name: str, values: list[str]) -> Any:
    """A switch is true; numbers are numbers; what may be several stays a list."""
    if name in _LISTS:
        return values
    if not values:
        return True
    text = " ".join(values)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def text(setup: TrainingSetup) -> str:
    """The file."""
    import yaml

    return f"# {TOOL}: {headline(setup)}; lay over examples/gpt3/gpt_config.yaml\n" + yaml.safe_dump(
        content(setup), sort_keys=False
    )
