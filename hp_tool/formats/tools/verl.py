"""Read and write verl 0.6: the actor update of its PPO and GRPO trainers (ppo_trainer.yaml)."""

import re
import shlex
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from hp_tool.domain.declared import BATCH_FIELDS
from hp_tool.domain.frameworks import training_engine
from hp_tool.domain.setups import TrainingSetup
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import UnsupportedError
from hp_tool.formats.interpolation import resolve_references
from hp_tool.formats.megatron_names import file_settings
from hp_tool.formats.reading import (
    Ignored,
    Reading,
    Setting,
    Settings,
    are_variables,
    describe_unknown_parts,
    hyphenated,
    parse_fraction,
    parse_whole_number,
    sort_settings,
    table,
)
from hp_tool.formats.registry import Format, register
from hp_tool.formats.scripts import FILL, assignments, fill_in_comment, script_text
from hp_tool.formats.shell import Word
from hp_tool.formats.signs import Sign, has_any_key, matches_pattern
from hp_tool.formats.source import Source, find_named_file, parse_keys, parse_mapping
from hp_tool.formats.tools.megatron_lm.read import recompute_value
from hp_tool.formats.tools.megatron_lm.scripts import environment
from hp_tool.formats.tools.megatron_lm.write import end_stage_flags, field_name, recomputation_flags
from hp_tool.formats.writing import (
    SHAPE_FIELDS,
    headline,
    model_name_argument,
    option_words,
    reject_inexpressible,
)

TOOL = "verl 0.6"
_ACTOR = "actor_rollout_ref.actor"
MODULES = "recompute-modules"
_STRATEGIES = ("fsdp", "fsdp2", "megatron")
_ENGINES = {"dp": "fsdp", "megatron": "megatron"}
"""The actor's strategy, by value of model_engine (since 0.7)."""
ENGINE = "model-engine"
_TRAINERS = {"ppo_trainer": "dp", "ppo_megatron_trainer": "megatron"}
"""verl's own configuration files, and the engine that each selects."""
_SIZES = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "virtual_pipeline_parallel_size": "virtual_pipeline_model_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "expert_parallel_size": "expert_model_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
}
"""Keys under actor.megatron, by field of `parallel`."""
_COMMON_FIELDS = BATCH_FIELDS | {"sequence_parallel"}
MEGATRON_FIELDS = _COMMON_FIELDS | {
    "offload",
    "offload_fraction",
    "moe_token_dispatcher_type",
    *_SIZES,
}
"""Query fields that overrides of Megatron workers can set."""
FSDP_FIELDS = _COMMON_FIELDS | {"data_parallel_shard_size", "context_parallel_size"}
"""Query fields that overrides of FSDP workers can set."""
_CONFIG = f"{_ACTOR}.megatron.override_transformer_config"
_USER_KEYS = (
    ("the model's folder or id, where verl knows it under another name", ()),
    ("your data and reward", ("data.train_files=train.parquet", "data.val_files=test.parquet")),
    (
        "your algorithm and rollouts",
        (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
            "trainer.logger=[console]",
        ),
    ),
)
"""Trainer settings outside the actor update, which the user fills in."""
_ON_HOST = f"{_ACTOR}.optim.override_optimizer_config"
"""Section of the optimizer's CPU offload. verl's other offload settings move data to the host only
during rollouts.
"""
ROLLOUTS = 8
"""Answers per prompt in an exported file. The reader multiplies the batch size by this number."""


def _has_megatron(workload: TrainingWorkload) -> bool:
    """Return True if the workers use Megatron, False for FSDP.

    Raises:
        UnsupportedError: The framework is neither of them.
    """
    workers = training_engine(workload.framework)
    if workers not in ("megatron-core", "torch-fsdp"):
        raise UnsupportedError(
            f"{TOOL} trains with Megatron Core or FSDP, not {workers}; set "
            "training.framework to verl or verl-fsdp and rank again",
            field="training.framework",
        )
    return workers == "megatron-core"


def overrides(setup: TrainingSetup) -> dict[str, str]:
    """Return the overrides for `python -m verl.trainer.main_ppo`, as dotted keys and values.

    Raises:
        UnsupportedError: Overrides cannot express the setup.
    """
    w, c = setup.workload, setup.parallel
    megatron = _has_megatron(w)
    fields = MEGATRON_FIELDS if megatron else FSDP_FIELDS
    reject_inexpressible(
        setup, tool=TOOL if megatron else f"{TOOL} over FSDP", expressed=fields | SHAPE_FIELDS
    )
    if w.precision != "bf16" or w.offload not in (None, "none", "optimizer"):
        raise UnsupportedError(
            f"{TOOL} supports bf16 and optimizer offload only",
            field="training.precision",
        )
    if w.global_batch_size % ROLLOUTS:
        raise UnsupportedError(
            f"{TOOL} samples {ROLLOUTS} answers per prompt, so the batch must be a "
            f"multiple of {ROLLOUTS}",
            field="training.global_batch_size",
        )
    prompts = w.global_batch_size // ROLLOUTS
    options = {
        "actor_rollout_ref.model.path": setup.model_path or model_name_argument(setup.model.name),
        "data.train_batch_size": str(prompts),
        "data.max_prompt_length": str(w.sequence_length // 4),
        "data.max_response_length": str(w.sequence_length - w.sequence_length // 4),
        "actor_rollout_ref.rollout.n": str(ROLLOUTS),
        f"{_ACTOR}.strategy": "megatron" if megatron else "fsdp2",
        f"{_ACTOR}.ppo_mini_batch_size": str(prompts),
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": str(c.micro_batch_size),
        "trainer.nnodes": str(setup.cluster.num_nodes),
        "trainer.n_gpus_per_node": str(setup.processes_per_node),
    }
    if not megatron:
        if setup.recomputes_by_layer is None:
            raise UnsupportedError(
                f"{TOOL} over FSDP supports parallel.recompute none and per_layer only",
                field="parallel.recompute",
            )
        if c.zero_stage < 2:
            raise UnsupportedError(
                f"{TOOL} over FSDP also shards gradients; set parallel.zero_stage to 2 or 3",
                field="parallel.zero_stage",
            )
        return options | {
            "actor_rollout_ref.model.enable_gradient_checkpointing": str(setup.recomputes_by_layer),
            f"{_ACTOR}.ulysses_sequence_parallel_size": str(c.context_parallel_size),
            f"{_ACTOR}.fsdp_config.fsdp_size": str(c.data_parallel_shard_size or -1),
            f"{_ACTOR}.fsdp_config.reshard_after_forward": str(c.zero_stage == 3),
        }
    if c.zero_stage > 1:
        raise UnsupportedError(
            f"{TOOL} runs Megatron with zero_stage 0 or 1 over all replicas only",
            field="parallel.zero_stage",
        )
    options |= {f"{_ACTOR}.megatron.{key}": str(getattr(c, field)) for field, key in _SIZES.items()}
    if setup.model.num_experts:
        options[f"++{_CONFIG}.moe_token_dispatcher_type"] = setup.strategy.moe_token_dispatcher_type
    if c.virtual_pipeline_parallel_size == 1:
        options[f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size"] = "null"
    options |= {
        f"{_ACTOR}.megatron.sequence_parallel": str(c.sequence_parallel),
        f"{_ACTOR}.megatron.use_distributed_optimizer": str(c.zero_stage == 1),
    }
    if w.offload == "optimizer":
        options |= {
            f"++{_ON_HOST}.{name}": "True"
            for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer")
        }
        options[f"++{_ON_HOST}.optimizer_offload_fraction"] = f"{w.offload_fraction or 1.0:g}"
    ends = option_words(end_stage_flags(setup))
    return options | {
        f"++{_CONFIG}.{field_name(name)}": f"[{','.join(words)}]"
        if name == MODULES
        else " ".join(words) or "True"
        for name, words in (option_words(recomputation_flags(setup.recompute)) | ends).items()
    }


def text(setup: TrainingSetup) -> str:
    """Return a script that starts verl's trainer."""
    options = overrides(setup)
    megatron = _has_megatron(setup.workload)
    config = ["--config-path=config", "--config-name=ppo_megatron_trainer.yaml"] if megatron else []
    path, *others = map(shlex.quote, assignments(options))
    marked = [f"# {FILL} 1: {_USER_KEYS[0][0]}", path, *others]
    for number, (what, lines) in enumerate(_USER_KEYS[1:], 2):
        marked += [f"# {FILL} {number}: {what}", *lines]
    return script_text(
        (
            f"# {TOOL}: {headline(setup)}. The actor's update alone; a batch is counted in prompts "
            f"of {ROLLOUTS} answers.",
            *fill_in_comment(what for what, _ in _USER_KEYS),
            *(
                f"export {name}={value}"
                for name, value in (environment(setup) if megatron else {}).items()
            ),
            "OVERRIDES=(",
            *(f"    {line}" for line in marked),
            ")",
            " ".join(("python3 -m verl.trainer.main_ppo", *config, '"${OVERRIDES[@]}" "$@"')),
        )
    )


def _all_settings(source: Source, reading: Reading) -> list[Setting]:
    """Return the settings in a file, or in the file and overrides of a script's command."""
    content = parse_mapping(source.text)
    if content is not None:
        return _file_settings(content, text=source.text, source=source)
    launch, script = source.launch(reading)
    chosen = re.search(
        r"--config[-_]name[= ]+(\S+)", " ".join(word.text.strip("'\"") for word in launch.words)
    )
    settings = parse_hydra_overrides(launch.words, reading)
    name = PurePosixPath(chosen[1]).name.removesuffix(".yaml") if chosen else "ppo_trainer"
    if (engine := _TRAINERS.get(name)) is not None:
        return (
            [Setting(name=ENGINE, written=chosen[0], values=(engine,)), *settings]
            if chosen
            else settings
        )
    file = find_named_file(script, f"{name}.yaml")
    if file is not None:
        return [*_file_settings(parse_keys(file), text="", source=source), *settings]
    if "config-name" not in map(hyphenated, source.ignore):
        reading.refuse(f"--config-name {name}: file not found; pass it with --file {name}.yaml")
    return settings


def _file_settings(content: dict[str, Any], *, text: str, source: Source) -> list[Setting]:
    """Return the settings in a file, and the engine that its defaults list selects."""
    settings, defaults = (
        file_settings(resolve_references(content, variables=source.variables), text=text),
        content.get("defaults"),
    )
    for each in defaults if isinstance(defaults, list) else ():
        engines = (
            {str(key).removeprefix("override "): str(value) for key, value in each.items()}
            if isinstance(each, dict)
            else {}
        )
        if (engine := engines.get("model_engine") or _TRAINERS.get(str(each))) is not None:
            settings.append(Setting(name=ENGINE, written=f"defaults: {each}", values=(engine,)))
    return settings


def _has_megatron_workers(settings: Settings, reading: Reading) -> bool:
    """Return True if the actor's workers use Megatron, False for FSDP."""
    engine, strategy = settings.text(ENGINE), settings.text(f"{_ACTOR}.strategy")
    if engine and engine not in _ENGINES:
        reading.refuse(f"model_engine {engine} is not supported; supported: {', '.join(_ENGINES)}")
    if strategy and strategy not in _STRATEGIES:
        reading.refuse(
            f"{_ACTOR}.strategy {strategy} is not supported; supported: {', '.join(_STRATEGIES)}"
        )
    megatron = (strategy or _ENGINES.get(engine)) == "megatron"
    for key in () if megatron else _SIZES.values():
        if (size := settings.text(f"{_ACTOR}.megatron.{key}", "1")) != "1":
            reading.refuse(
                f"{_ACTOR}.megatron.{key} {size}: FSDP's workers ignore it; set "
                "model_engine=megatron"
            )
    return megatron


def read(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of the actor update."""
    by_name = sort_settings(
        _all_settings(source, reading), table=table("verl"), reading=reading, spare=source.ignore
    )
    settings = Settings(by_name)
    text_of, whole_number, is_on = settings.text, settings.whole_number, settings.is_on
    megatron = _has_megatron_workers(settings, reading)
    nodes, per_node = whole_number("trainer.nnodes"), whole_number("trainer.n_gpus_per_node", 8)
    reading.num_gpus = source.num_gpus or nodes * per_node
    length = whole_number("data.max_prompt_length", 512) + whole_number(
        "data.max_response_length", 512
    )
    if any(missing_field.field == "training.sequence_length" for missing_field in reading.missing):
        length = parse_whole_number(
            reading.overrides.get("training.sequence_length", 0), "training.sequence_length"
        )
    batch = whole_number(f"{_ACTOR}.ppo_mini_batch_size", 256) * whole_number(
        "actor_rollout_ref.rollout.n"
    )
    micro = whole_number(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", 0)
    if is_on(f"{_ACTOR}.use_dynamic_bsz"):
        micro = (
            max(whole_number(f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384) // length, 1)
            if length
            else 0
        )
    if micro == 0:
        reading.add_missing(
            "parallel.micro_batch_size",
            f"{_ACTOR}.ppo_micro_batch_size_per_gpu is missing; add",
            example=1,
        )
    parallel: dict[str, Any] = {"micro_batch_size": max(micro, 1)}
    training: dict[str, Any] = {
        "sequence_length": length,
        "global_batch_size": batch,
        "precision": "bf16",
    }
    section = f"{_ACTOR}.megatron" if megatron else f"{_ACTOR}.fsdp_config"
    if is_on(f"{_ON_HOST}.optimizer_cpu_offload"):
        training["offload"] = "optimizer"
        if (
            share := parse_fraction(
                text_of(f"{_ON_HOST}.optimizer_offload_fraction", "1"), "optimizer_offload_fraction"
            )
        ) < 1.0:
            training["offload_fraction"] = share
    if megatron:
        training["framework"] = "verl"
        tensor = whole_number(f"{section}.tensor_model_parallel_size")
        parallel |= {
            field: whole_number(f"{section}.{key}")
            for field, key in _SIZES.items()
            if field != "expert_tensor_parallel_size"
        }
        parallel["expert_tensor_parallel_size"] = whole_number(
            f"{section}.expert_tensor_parallel_size",
            tensor if parallel["expert_parallel_size"] > 1 else 1,
        )
        parallel["sequence_parallel"] = (
            is_on(f"{section}.sequence_parallel", default=True) and tensor > 1
        )
        parallel["zero_stage"] = int(is_on(f"{section}.use_distributed_optimizer", default=True))
        override = f"{section}.override_transformer_config"
        dispatcher = (
            "flex"
            if is_on(f"{override}.moe_enable_deepep")
            else text_of(f"{override}.moe_token_dispatcher_type")
        )
        parallel |= {"moe_token_dispatcher_type": dispatcher} if dispatcher else {}
        parallel["recompute"] = recompute_value(
            text_of(f"{override}.recompute_granularity", "none"),
            modules=re.findall(r"\w+", text_of(f"{override}.recompute_modules", "core_attn")),
            method=text_of(f"{override}.recompute_method", "uniform"),
            num_layers=whole_number(f"{override}.recompute_num_layers"),
        )
    else:
        shard, ulysses = (
            whole_number(f"{section}.fsdp_size", -1),
            whole_number(f"{_ACTOR}.ulysses_sequence_parallel_size"),
        )
        training["framework"] = "verl-fsdp"
        checkpointed = is_on("actor_rollout_ref.model.enable_gradient_checkpointing", default=True)
        parallel |= {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "context_parallel_size": ulysses
            if ulysses > 1
            else whole_number(f"{section}.ulysses_sequence_parallel_size"),
            "zero_stage": 3 if is_on(f"{section}.reshard_after_forward", default=True) else 2,
            "recompute": "per_layer" if checkpointed else "none",
        }
        if shard > 0:
            parallel["data_parallel_shard_size"] = shard
    reading.query = {"kind": "training", "training": training, "parallel": parallel}
    if model := text_of("actor_rollout_ref.model.path"):
        reading.query["model"] = model


def parse_hydra_overrides(words: Iterable[Word], reading: Reading) -> list[Setting]:
    """Return the Hydra overrides in a command; reject deletions and unknown values."""
    settings = []
    for word in words:
        name, separator, value = word.text.partition("=")
        if word.text.startswith("~"):
            reading.refuse(f"{word.text}: deleting a key is not supported")
        elif separator and not name.startswith("-"):
            key, values = hyphenated(name.lstrip("+")), (value.strip("'\""),)
            settings.append(
                Setting(
                    name=key,
                    written=name,
                    values=values,
                    line=word.line or None,
                    unknown=word.unknown,
                )
            )
        elif word.unknown and (reading.absent or not are_variables(word.unknown)):
            reading.refuse(f"{word.text}: {describe_unknown_parts(word.unknown)}")
        else:
            reason = "nothing sets it" if word.unknown else "chooses the trainer's own file"
            reading.ignored.append(Ignored(flag=word.text, reason=reason, line=word.line))
    return settings


register(
    Format(
        name="verl",
        signs=(
            Sign(place="keys", rank=20, matches=has_any_key("actor_rollout_ref", "critic")),
            Sign(
                place="script",
                rank=17,
                matches=matches_pattern(r"verl\.trainer\.(fsdp_)?sft_trainer"),
                refused="verl's trainer of SFT",
            ),
            Sign(
                place="script",
                rank=30,
                matches=matches_pattern(r"\bverl\.trainer\.|actor_rollout_ref\."),
            ),
        ),
        read=read,
        write=text,
        options=overrides,
        axes={"recompute": ("none", "selective", "full"), "zero_stage": (0, 1)},
        fsdp_axes={
            **dict.fromkeys(
                ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"), 1
            ),
            "expert_tensor_parallel_size": 1,
            "recompute": ("none", "per_layer"),
            "zero_stage": (2, 3),
        },
        flags=lambda setup: assignments(overrides(setup)),
        reads="verl's YAML file, or a script with overrides; only the update of the actor is read",
        writes="a script with overrides for the update of the actor",
        checked="keys recorded from verl's configuration files; read back by `import`",
    )
)
