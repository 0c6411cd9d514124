"""nanotron 0.4's YAML file of run_train.py, both ways: keys as in src/nanotron/config."""

from collections.abc import Iterable, Mapping
from typing import Any

from hp_tool.errors import UnsupportedError
from hp_tool.formats.reading import Reading, as_settings, sort, table, whole_number
from hp_tool.formats.setup import SHAPE, TrainingSetup, headline, refuse_unsaid

TOOL = "nanotron 0.4"
_MODEL = {
    "num_hidden_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads", "intermediate_size": "intermediate_size", "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_word_embeddings", "max_position_embeddings": "max_position_embeddings",
}  # fmt: skip
"""Fields of a model, and their keys under model.model_config."""
SAID = {
    "sequence_length", "global_batch_size", "precision", "attention", "optimizer", "gradient_precision", "parameter_precision",
    "tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "context_parallel_size", "micro_batch_size",
    "sequence_parallel", "recompute", "zero_stage", "overlap", "cross_entropy", "kernel_fusion",
}  # fmt: skip


def config(setup: TrainingSetup) -> dict[str, Any]:
    """The YAML file's content. Raises UnsupportedError for what nanotron cannot say or run."""
    refuse_unsaid(setup, tool=TOOL, said=SAID | SHAPE, runs="nanotron")
    m, c, w = setup.model, setup.parallel, setup.workload
    if (
        m.num_experts
        or m.kv_lora_rank is not None
        or not m.gated_mlp
        or m.normalization != "rmsnorm"
        or m.architecture != "decoder"
    ):
        raise UnsupportedError(f"{TOOL}'s Llama has no setting for the architecture of {m.name}", field="model")
    if w.precision != "bf16" or setup.recompute.granularity not in ("none", "full") or c.zero_stage > 1:
        raise UnsupportedError(
            f"{TOOL} trains in bf16, with zero_stage 0 or 1, and recomputes whole layers or nothing", field="parallel"
        )
    return {
        "general": {"project": "hp-tool", "run": "FILL IN 1: the run's name", "seed": 42},
        "parallelism": {
            "dp": c.data_parallel_size,
            "tp": c.tensor_parallel_size,
            "pp": c.pipeline_parallel_size,
            "pp_engine": "1f1b",
            "tp_mode": "REDUCE_SCATTER" if c.sequence_parallel and c.tensor_parallel_size > 1 else "ALL_REDUCE",
            "tp_linear_async_communication": c.sequence_parallel and c.tensor_parallel_size > 1,
            "recompute_layer": setup.recompute.granularity == "full",
        },
        "tokens": {
            "micro_batch_size": c.micro_batch_size,
            "sequence_length": w.sequence_length,
            "batch_accumulation_per_replica": setup.accumulation_steps,
            "train_steps": 1000,
        },
        "model": {
            "dtype": "bfloat16",
            "init_method": {"std": 0.02},
            "model_config": {
                **{
                    key: getattr(m, {"num_key_value_heads": "kv_heads", "intermediate_size": "ffn_size"}.get(field, field))
                    for field, key in _MODEL.items()
                },
                "max_position_embeddings": m.max_position_embeddings or w.sequence_length,
                "is_llama_config": True,
                "hidden_act": "silu",
                "rope_interleaved": False,
            },
        },
        "optimizer": {
            "zero_stage": c.zero_stage,
            "accumulate_grad_in_fp32": w.gradient_precision in (None, "fp32"),
            "weight_decay": 0.1,
            "clip_grad": 1.0,
            "optimizer_factory": {
                "name": "adamW",
                "adam_beta1": 0.9,
                "adam_beta2": 0.95,
                "adam_eps": 1e-8,
                "torch_adam_is_fused": True,
            },
            "learning_rate_scheduler": {
                "learning_rate": 3e-4,
                "lr_warmup_steps": 100,
                "lr_decay_style": "cosine",
                "min_decay_lr": 3e-5,
            },
        },
        "tokenizer": {"tokenizer_name_or_path": "FILL IN 2: the tokenizer"},
        "data_stages": [{"name": "stable", "start_training_step": 1, "data": {"dataset": "FILL IN 3: the data"}}],
        "checkpoints": {"checkpoint_interval": 1000, "checkpoints_path": "FILL IN 4: where checkpoints go"},
        "logging": {"iteration_step_info_interval": 1, "log_level": "info", "log_level_replica": "info"},
    }


def text(setup: TrainingSetup) -> str:
    """The file, ready for run_train.py --config-file once it is filled in."""
    import yaml

    head = (
        f"# {TOOL}: {headline(setup)}; CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun ... run_train.py --config-file THIS.\n"
        "# Fill in, each marked FILL IN below: 1 the run's name, 2 the tokenizer, 3 the data, 4 the folder of checkpoints.\n"
    )
    return head + yaml.safe_dump(config(setup), sort_keys=False)


def read(content: Mapping[str, Any], *, text: str, reading: Reading, num_gpus: int | None, spare: Iterable[str] = ()) -> None:
    """Fill `reading` with the query of a nanotron file."""
    found = sort(as_settings(content, lines=text), table=table("nanotron"), reading=reading, spare=spare)

    def said(name: str, default: str) -> str:
        setting = found.get(name)
        value = " ".join(setting.values) if setting is not None else default
        return default if value in ("none", "null", "") else value

    def size(name: str, default: int = 1) -> int:
        return whole_number(said(name, str(default)), name)

    degrees = [size(f"parallelism.{name}") for name in ("dp", "tp", "pp")]
    context, experts = size("parallelism.context-parallel-size"), size("parallelism.expert-parallel-size")
    reading.num_gpus = num_gpus or degrees[0] * degrees[1] * degrees[2] * context * experts
    micro, steps = size("tokens.micro-batch-size"), size("tokens.batch-accumulation-per-replica")
    model: dict[str, Any] = {
        "normalization": "rmsnorm",
        "gated_mlp": True,
        "position_embedding": "rotary",
        "mlp_bias": False,
        "attention_bias": False,
    }
    for field, key in _MODEL.items():
        name = f"model.model-config.{key.replace('_', '-')}"
        if field == "tie_word_embeddings":
            model[field] = said(name, "false") == "true"
        elif name in found:
            model[field] = size(name)
        elif field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            reading.lack(f"model.{field}", f"model.model_config.{key} is not said; add --set model.{field}=...")
    if size("model.model-config.moe-config.num-experts", 1) > 1:
        reading.refused.append("model.model_config.moe_config: experts are not modelled for nanotron")
    scattered = said("parallelism.tp-mode", "ALL_REDUCE").upper() == "REDUCE_SCATTER"
    reading.query = {
        "kind": "training",
        "model": model,
        "training": {
            "sequence_length": size("tokens.sequence-length", 2048),
            "global_batch_size": micro * steps * degrees[0],
            "precision": {"float32": "fp32", "float16": "fp16"}.get(said("model.dtype", "bfloat16"), "bf16"),
            "framework": "nanotron",
            **({} if said("optimizer.accumulate-grad-in-fp32", "true") == "true" else {"gradient_precision": "bf16"}),
        },
        "parallel": {
            "tensor_parallel_size": degrees[1],
            "pipeline_parallel_size": degrees[2],
            "micro_batch_size": micro,
            "sequence_parallel": scattered and degrees[1] > 1,
            "recompute": "full" if said("parallelism.recompute-layer", "false") == "true" else "none",
            "zero_stage": size("optimizer.zero-stage", 0),
            **({"context_parallel_size": context} if context > 1 else {}),
        },
    }
