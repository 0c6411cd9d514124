"""verl 0.6: the actor's update of its PPO and GRPO trainers, as overrides of ppo_trainer.yaml, both ways."""

from collections.abc import Iterable, Mapping
from typing import Any

from hp_tool.errors import UnsupportedError
from hp_tool.formats.reading import Reading, Setting, sort, table, whole_number
from hp_tool.formats.setup import SHAPE, TrainingSetup, headline, refuse_unsaid

TOOL = "verl 0.6"
_ACTOR = "actor_rollout_ref.actor"
_SIZES = {
    "tensor_parallel_size": "tensor_model_parallel_size", "pipeline_parallel_size": "pipeline_model_parallel_size",
    "virtual_pipeline_parallel_size": "virtual_pipeline_model_parallel_size", "context_parallel_size": "context_parallel_size",
    "expert_parallel_size": "expert_model_parallel_size", "expert_tensor_parallel_size": "expert_tensor_parallel_size",
}  # fmt: skip
"""Fields of `parallel`, and their keys under actor.megatron."""
SAID = {
    "sequence_length", "global_batch_size", "precision", "attention", "optimizer", "micro_batch_size", "recompute",
    "zero_stage",
    "sequence_parallel", "offload", "data_parallel_shard_size", "parameter_precision", "cross_entropy", "dropout",
    "moe_token_dispatcher_type", *_SIZES,
}  # fmt: skip
ROLLOUTS = 8
"""Answers a prompt in an exported file: what reads it back multiplies by it."""


def overrides(setup: TrainingSetup) -> dict[str, str]:
    """Dotted keys and values for `python -m verl.trainer.main_ppo`. Raises UnsupportedError for what they cannot say."""
    refuse_unsaid(setup, tool=TOOL, said=SAID | SHAPE)
    w, c, granularity = setup.workload, setup.parallel, setup.recompute.granularity
    megatron = w.framework == "megatron-core"
    if w.precision != "bf16" or w.offload not in (None, "none", "optimizer"):
        raise UnsupportedError(f"{TOOL} trains in bf16, with the optimizer offloaded or nothing", field="training.precision")
    if w.global_batch_size % ROLLOUTS:
        raise UnsupportedError(
            f"{TOOL}: a batch of {ROLLOUTS} answers a prompt has a multiple of {ROLLOUTS} sequences",
            field="training.global_batch_size",
        )
    prompts = w.global_batch_size // ROLLOUTS
    options = {
        "actor_rollout_ref.model.path": setup.model.name,
        "data.train_batch_size": str(prompts),
        "data.max_prompt_length": str(w.sequence_length // 4),
        "data.max_response_length": str(w.sequence_length - w.sequence_length // 4),
        "actor_rollout_ref.rollout.n": str(ROLLOUTS),
        f"{_ACTOR}.strategy": "megatron" if megatron else "fsdp2",
        f"{_ACTOR}.ppo_mini_batch_size": str(prompts),
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": str(c.micro_batch_size),
        "trainer.nnodes": str(setup.cluster.num_nodes),
        "trainer.n_gpus_per_node": str(min(setup.cluster.gpus_per_node, setup.cluster.num_gpus)),
    }
    offloaded = str(w.offload == "optimizer").capitalize()
    if not megatron:
        if (
            c.pipeline_parallel_size > 1
            or c.tensor_parallel_size > 1
            or granularity not in ("none", "per_layer")
            or c.zero_stage < 2
        ):
            raise UnsupportedError(
                f"{TOOL} runs FSDP without TP and PP, and recomputes whole layers or nothing", field="parallel"
            )
        return options | {
            "actor_rollout_ref.model.enable_gradient_checkpointing": str(granularity != "none").capitalize(),
            f"{_ACTOR}.ulysses_sequence_parallel_size": str(c.context_parallel_size),
            f"{_ACTOR}.fsdp_config.fsdp_size": str(c.data_parallel_shard_size or -1),
            f"{_ACTOR}.fsdp_config.reshard_after_forward": str(c.zero_stage == 3).capitalize(),
            f"{_ACTOR}.fsdp_config.optimizer_offload": offloaded,
        }
    if granularity not in ("none", "selective", "full") or c.zero_stage > 1 or setup.recompute.modules:
        raise UnsupportedError(
            f"{TOOL} runs Megatron with zero_stage 0 or 1 and its usual recomputation", field="parallel.recompute"
        )
    options |= {f"{_ACTOR}.megatron.{key}": str(getattr(c, field)) for field, key in _SIZES.items()}
    if setup.model.num_experts:
        options[f"+{_ACTOR}.megatron.override_transformer_config.moe_token_dispatcher_type"] = (
            setup.strategy.moe_token_dispatcher_type
        )
    if c.virtual_pipeline_parallel_size == 1:
        options[f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size"] = "null"
    options |= {
        f"{_ACTOR}.megatron.sequence_parallel": str(c.sequence_parallel).capitalize(),
        f"{_ACTOR}.megatron.use_distributed_optimizer": str(c.zero_stage == 1).capitalize(),
        f"{_ACTOR}.megatron.optimizer_offload": offloaded,
    }
    if granularity != "none":
        options[f"+{_ACTOR}.megatron.override_transformer_config.recompute_granularity"] = granularity
    if granularity == "full":
        options[f"+{_ACTOR}.megatron.override_transformer_config.recompute_method"] = setup.recompute.method or "uniform"
        options[f"+{_ACTOR}.megatron.override_transformer_config.recompute_num_layers"] = str(setup.recompute.num_layers or 1)
    return options


def text(setup: TrainingSetup) -> str:
    """A script that starts the trainer with these overrides."""
    lines = [f"{name}={value}" for name, value in overrides(setup).items()]
    return "\n".join(
        (
            "#!/usr/bin/env bash",
            f"# {TOOL}: {headline(setup)}. The actor's update alone; rollouts, reference and rewards are yours.",
            "# Fill in, each marked FILL IN below:",
            "#   1. the model's folder or id, where verl knows it under another name",
            "#   2. the data, the reward and the rollout engine, behind this script's name",
            "# A batch is counted in prompts of 8 answers; a row is one quarter prompt.",
            "# FILL IN 1: actor_rollout_ref.model.path; FILL IN 2: data.train_files=... actor_rollout_ref.rollout.name=vllm "
            "...",
            " \\\n    ".join(("python3 -m verl.trainer.main_ppo", *lines, '"$@"')),
            "",
        )
    )


def read(settings: Iterable[Setting], *, reading: Reading, num_gpus: int | None, spare: Iterable[str] = ()) -> None:
    """Fill `reading` with the query of the actor's update."""
    found = sort(settings, table=table("verl"), reading=reading, spare=spare)
    plain = {name.lstrip("+"): each for name, each in found.items()}

    def text_of(name: str, default: str) -> str:
        setting = plain.get(name.replace("_", "-"))
        value = " ".join(setting.values) if setting is not None and not setting.unknown else ""
        return value if value.lower() not in ("", "null", "none") else default

    def size(name: str, default: int = 1) -> int:
        return whole_number(text_of(name, str(default)), name)

    def on(name: str) -> bool:
        return text_of(name, "false").lower() == "true"

    megatron = text_of(f"{_ACTOR}.strategy", "fsdp") == "megatron"
    nodes, per_node = size("trainer.nnodes"), size("trainer.n_gpus_per_node", 8)
    reading.num_gpus = num_gpus or nodes * per_node
    length = size("data.max_prompt_length", 512) + size("data.max_response_length", 512)
    batch = size(f"{_ACTOR}.ppo_mini_batch_size", 256) * size("actor_rollout_ref.rollout.n")
    micro = size(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", 0)
    if on(f"{_ACTOR}.use_dynamic_bsz"):
        micro = max(size(f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384) // max(length, 1), 1)
    if micro == 0:
        reading.lack(
            "parallel.micro_batch_size",
            f"{_ACTOR}.ppo_micro_batch_size_per_gpu is not said; add --set parallel.micro_batch_size=1",
        )
    parallel: dict[str, Any] = {"micro_batch_size": max(micro, 1)}
    training: dict[str, Any] = {"sequence_length": length, "global_batch_size": batch, "precision": "bf16"}
    section = f"{_ACTOR}.megatron" if megatron else f"{_ACTOR}.fsdp_config"
    if on(f"{section}.optimizer_offload"):
        training["offload"] = "optimizer"
    if megatron:
        tensor = size(f"{section}.tensor_model_parallel_size")
        parallel |= {field: size(f"{section}.{key}") for field, key in _SIZES.items() if field != "expert_tensor_parallel_size"}
        parallel["expert_tensor_parallel_size"] = size(
            f"{section}.expert_tensor_parallel_size", tensor if parallel["expert_parallel_size"] > 1 else 1
        )
        told = text_of(f"{section}.sequence_parallel", "true").lower() == "true"
        parallel["sequence_parallel"] = told and tensor > 1
        parallel["zero_stage"] = int(text_of(f"{section}.use_distributed_optimizer", "true").lower() == "true")
        override = f"{section}.override_transformer_config"
        granularity = text_of(f"{override}.recompute_granularity", "none")
        method, count = text_of(f"{override}.recompute_method", "uniform"), size(f"{override}.recompute_num_layers")
        whole = granularity != "full" or (method == "uniform" and count == 1)
        parallel["recompute"] = granularity if whole else {"granularity": "full", "method": method, "num_layers": count}
    else:
        shard = size(f"{section}.fsdp_size", -1)
        training["framework"] = "torch-fsdp"
        reshard = text_of(f"{section}.reshard_after_forward", "true").lower() == "true"
        checkpointed = text_of("actor_rollout_ref.model.enable_gradient_checkpointing", "true").lower() == "true"
        parallel |= {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "context_parallel_size": size(f"{_ACTOR}.ulysses_sequence_parallel_size"),
            "zero_stage": 3 if reshard else 2,
            "recompute": "per_layer" if checkpointed else "none",
        }
        if shard > 0:
            parallel["data_parallel_shard_size"] = shard
    reading.query = {"kind": "training", "training": training, "parallel": parallel}
    if model := text_of("actor_rollout_ref.model.path", ""):
        reading.query["model"] = model


def settings_of(words: Iterable[Any]) -> list[Setting]:
    """Hydra's overrides among a command's words."""
    found = []
    for word in words:
        name, separator, value = word.text.partition("=")
        if separator and "." in name:
            found.append(
                Setting(
                    name=name.lstrip("+").replace("_", "-"),
                    written=name,
                    values=(value.strip("'\""),),
                    line=word.line or None,
                    unknown=word.unknown,
                )
            )
    return found


def is_verl(content: Mapping[str, Any]) -> bool:
    return "actor_rollout_ref" in content
