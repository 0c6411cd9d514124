"""Read and write torchtitan 0.2's TOML file (torchtitan/config/job_config.py)."""

import functools
import re
import tomllib
from collections.abc import Mapping, Set
from typing import Any

import yaml

from hp_tool.catalog import library
from hp_tool.domain.declared import BATCH_FIELDS, SPLIT_FIELDS, parse_names
from hp_tool.domain.setups import TrainingSetup
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.reading import (
    Reading,
    as_settings,
    key_values,
    read_table_file,
    sort_settings,
    table,
)
from hp_tool.formats.registry import Format, register
from hp_tool.formats.signs import Sign, matches_pattern
from hp_tool.formats.source import Source, find_named_file
from hp_tool.formats.writing import SHAPE_FIELDS, headline, reject_inexpressible

TOOL = "torchtitan 0.2"
FLAVORS = {
    "llama-3-8b": ("llama3", "8B"),
    "llama-3.1-8b": ("llama3", "8B"),
    "llama-3-70b": ("llama3", "70B"),
    "llama-3.1-70b": ("llama3", "70B"),
    "llama-3.1-405b": ("llama3", "405B"),
    "qwen3-0.6b": ("qwen3", "0.6B"),
    "qwen3-1.7b": ("qwen3", "1.7B"),
    "qwen3-4b": ("qwen3", "4B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"),
    "qwen3-32b": ("qwen3", "32B"),
    "deepseek-v2-lite": ("deepseek_v3", "16B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
}
"""(model.name, model.flavor) by catalogue name."""


@functools.cache
def models_by_flavor() -> Mapping[tuple[str, str], Any]:
    """Return importable models by (package, flavor): a catalogue name, or model fields."""
    content = yaml.safe_load(read_table_file("torchtitan-models.yaml"))
    return {
        (package, flavor): _changed_model(model)
        if isinstance(model, dict) and "of" in model
        else model
        for package, flavors in content.items()
        for flavor, model in flavors.items()
    }


def _changed_model(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a catalogue model (`of` in `changes`) with the other changes applied."""
    changed = {key: value for key, value in changes.items() if key != "of"}
    fields = library.entry("models", changes["of"]).fields | changed
    if isinstance(text := fields.get("text_config"), Mapping):
        fields["text_config"] = {**text, **changed}
    return dict(fields)


_SCHEDULES = {False: "1F1B", True: "Interleaved1F1B"}
_CONVERTERS = {
    "bf16": [],
    "fp32": [],
    "fp8": ["quantize.linear.float8"],
    "mxfp8": ["quantize.linear.mx"],
}
_OLDER_CONVERTERS = {
    "float8": "quantize.linear.float8",
    "mx": "quantize.linear.mx",
    "mxfp8": "quantize.linear.mx",
}
"""Names of the converters in release 0.1."""
_CHECKPOINTS: dict[str, dict[str, str]] = {
    "none": {"mode": "none"},
    "per_op": {"mode": "selective", "selective_ac_option": "op"},
    "per_layer": {"mode": "full"},
    "full": {"mode": "full"},
}
MAX_DOTS = 1_000
"""Maximum number of dots per line. A long list of numbers legitimately contains some."""
EXPRESSED_FIELDS = (
    BATCH_FIELDS
    | SPLIT_FIELDS
    | parse_names("""
    attention optimizer parameter_precision data_parallel_shard_size
    context_parallel_communication
""")
)


def config(
    setup: TrainingSetup,
    *,
    tool: str = TOOL,
    expressed: Set[str] = EXPRESSED_FIELDS,
    flavors: Mapping[str, tuple[str, str]] = FLAVORS,
) -> dict[str, Any]:
    """Return the content of the TOML file.

    Raises:
        UnsupportedError: torchtitan does not support the setup.
    """
    reject_inexpressible(setup, tool=tool, expressed=expressed | SHAPE_FIELDS, runs="torch-fsdp")
    c, w = setup.parallel, setup.workload
    if setup.model.name not in flavors:
        raise UnsupportedError(
            f"{tool} has no flavor for {setup.model.name}; it has flavors for {', '.join(flavors)}",
            field="model",
        )
    if w.precision not in _CONVERTERS or w.attention != "flash" or w.optimizer != "adam":
        raise UnsupportedError(
            f"{tool} supports Adam, fused attention and the precisions "
            f"{', '.join(_CONVERTERS)} only",
            field="training",
        )
    if (
        c.zero_stage < 2
        and c.data_parallel_size > 1
        and c.tensor_parallel_size * c.pipeline_parallel_size > 1
    ):
        raise UnsupportedError(
            f"{tool} shards with FSDP; set parallel.zero_stage to 2 or 3",
            field="parallel.zero_stage",
        )
    exchange = setup.strategy.context_parallel_communication
    if c.context_parallel_size > 1 and exchange not in (None, "p2p", "all_gather"):
        raise UnsupportedError(
            f"{tool} does not support parallel.context_parallel_communication {exchange}; "
            "choose p2p or all_gather",
            field="parallel.context_parallel_communication",
        )
    if setup.recompute.granularity not in _CHECKPOINTS or setup.recompute.num_layers is not None:
        raise UnsupportedError(
            f"{tool} supports parallel.recompute {', '.join(_CHECKPOINTS)} only",
            field="parallel.recompute",
        )
    name, flavor = flavors[setup.model.name]
    copies = c.data_parallel_size
    shard = c.data_parallel_shard_size or (copies if c.zero_stage >= 2 else 1)
    pipelined = c.pipeline_parallel_size > 1
    first, last = setup.missing_layers
    model: dict[str, Any] = {"name": name, "flavor": flavor}
    if _CONVERTERS[w.precision]:
        model["converters"] = _CONVERTERS[w.precision]
    return {
        "model": model,
        "optimizer": {"name": "AdamW"},
        "training": {
            # With pipeline parallelism, the local batch is split into micro-batches; without it,
            # gradients accumulate over steps.
            "local_batch_size": c.micro_batch_size * (setup.accumulation_steps if pipelined else 1),
            "global_batch_size": w.global_batch_size,
            "seq_len": w.sequence_length,
            "dtype": "bfloat16" if w.parameter_precision == "bf16" else "float32",
            "mixed_precision_param": "float32" if w.precision == "fp32" else "bfloat16",
        },
        "parallelism": {
            "data_parallel_replicate_degree": copies // shard,
            "data_parallel_shard_degree": shard,
            "fsdp_reshard_after_forward": "always" if c.zero_stage == 3 else "never",
            "tensor_parallel_degree": c.tensor_parallel_size,
            "pipeline_parallel_degree": c.pipeline_parallel_size,
            "pipeline_parallel_schedule": _SCHEDULES[c.virtual_pipeline_parallel_size > 1],
            "pipeline_parallel_microbatch_size": c.micro_batch_size if pipelined else 1,
            "pipeline_parallel_first_stage_less_layers": first,
            "pipeline_parallel_last_stage_less_layers": last,
            "pipeline_parallel_layers_per_stage": (setup.model.num_hidden_layers + first + last)
            // (c.pipeline_parallel_size * c.virtual_pipeline_parallel_size),
            "context_parallel_degree": c.context_parallel_size,
            "context_parallel_rotate_method": "alltoall"
            if setup.strategy.context_parallel_communication == "p2p"
            else "allgather",
            "expert_parallel_degree": c.expert_parallel_size,
            "expert_tensor_parallel_degree": c.expert_tensor_parallel_size,
        },
        "activation_checkpoint": _CHECKPOINTS[setup.recompute.granularity],
        "compile": {"enable": False},  # The cost model was fitted to runs without torch.compile.
    }


def toml_file(setup: TrainingSetup) -> str:
    """Return the file for --job.config_file."""
    import tomli_w

    return f"# {TOOL}: {headline(setup)}\n" + tomli_w.dumps(config(setup))


def _toml_text(source: Source, reading: Reading) -> str:
    """Return the TOML text: the source itself, or the file that a script names.

    Raises:
        InputError: The file is not available.
    """
    if re.search(r"(?m)^[ \t]*\[\w", source.text) or not re.search(
        r"--job\.config_file|torchtitan", source.text
    ):
        return source.text
    launch, script = source.launch(reading)
    arguments = [word.text for word in launch.words]
    named = next(
        (word.partition("=")[2] for word in arguments if word.startswith("--job.config_file=")), ""
    )
    named = named or next(
        (
            arguments[i + 1]
            for i, word in enumerate(arguments[:-1])
            if word in ("--job.config_file", "--job.config-file")
        ),
        "",
    )
    text = find_named_file(script, named)
    if not text:
        raise InputError(
            f"the command's file {named or '(none named)'} was not found; import it, or "
            "pass it with --file",
            field="command",
        )
    reading.refused += [
        f"{word}: overrides on the command line are not read; write them into the file"
        for word in arguments
        if re.match(
            r"--(?!(job|metrics|profiling|checkpoint|lr_scheduler|comm|validation|experimental)\.)\w+\.",
            word,
        )
    ]
    return text


def read(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of a TOML file.

    Raises:
        InputError: The file is invalid.
        UnsupportedError: A setting is not modelled.
    """
    text = _toml_text(source, reading)
    if any(
        line.count(".") > MAX_DOTS for line in text.splitlines()
    ):  # tomllib takes quadratic time in the length of a dotted key.
        raise InputError(
            f"a line has more than {MAX_DOTS} dots, which no {TOOL} key or value has", code="syntax"
        )
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not a TOML file: {error}", code="syntax") from None
    sort_settings(
        as_settings(tables, lines=text),
        table=table("torchtitan"),
        reading=reading,
        spare=source.ignore,
    )
    read_sections(tables, source=source, reading=reading)


def read_sections(
    tables: Mapping[str, Any],
    *,
    source: Source,
    reading: Reading,
    flavors: Mapping[str, tuple[str, str]] = FLAVORS,
    release: str = "0.2",
) -> None:
    """Fill the reading with the query of a configuration's sections.

    Raises:
        InputError: A value is invalid.
        UnsupportedError: A setting is not modelled.
    """

    def section(name: str) -> dict[str, Any]:
        content = tables.get(name, {})
        if not isinstance(content, dict):
            raise InputError(f"{name} must be a table", field=name)
        return content

    model, batch, split = section("model"), section("training"), section("parallelism")
    t, p, c = (
        _degree(split, f"{kind}_parallel_degree") for kind in ("tensor", "pipeline", "context")
    )
    replicas = max((reading.num_gpus or 0) // (t * p * c), 1)
    shard = _degree(split, "data_parallel_shard_degree", default=-1, least=-1)
    copies = _degree(split, "data_parallel_replicate_degree")
    shard = max(replicas // copies, 1) if shard == -1 else shard
    local = _degree(
        batch, "local_batch_size" if "batch_size" not in batch else "batch_size", default=8
    )
    global_batch = _degree(batch, "global_batch_size", default=-1, least=-1)
    global_batch = local * replicas if global_batch == -1 else global_batch
    micro = _degree(split, "pipeline_parallel_microbatch_size") if p > 1 else local
    parallel: dict[str, Any] = {
        "tensor_parallel_size": t,
        "pipeline_parallel_size": p,
        "virtual_pipeline_parallel_size": 1,
        "context_parallel_size": c,
        "expert_parallel_size": _degree(split, "expert_parallel_degree"),
        "expert_tensor_parallel_size": _degree(split, "expert_tensor_parallel_degree"),
        "micro_batch_size": micro,
        "sequence_parallel": t > 1,
        "recompute": _read_recompute(section("activation_checkpoint")),
        "zero_stage": _read_zero_stage(
            split, reading, sharded=shard > 1 or copies == 1, pipelined=p > 1
        ),
    }
    if copies > 1 and shard > 1:
        parallel["data_parallel_shard_size"] = shard
    if c > 1:
        method = split.get("context_parallel_rotate_method", "allgather")
        if method not in ("allgather", "alltoall"):
            reading.refuse(
                f"parallelism.context_parallel_rotate_method {method} is not supported; "
                "supported: allgather, alltoall"
            )
        p2p = method == "alltoall"
        parallel["context_parallel_communication"] = "p2p" if p2p else "all_gather"
    name, flavor = str(model.get("name", "llama3")), str(model.get("flavor", "debugmodel"))
    shape: Any = next((ours for ours, theirs in flavors.items() if theirs == (name, flavor)), None)
    if shape is None and (release != "0.2" or name != "gpt_oss"):
        shape = models_by_flavor().get((name, flavor))
    if shape is None:
        reading.add_missing("model", f"unknown model {name} {flavor}; add", example="")
    schedule = split.get("pipeline_parallel_schedule", "1F1B")
    if schedule not in _SCHEDULES.values():
        raise UnsupportedError(
            f"pipeline_parallel_schedule {schedule} is not supported for torchtitan",
            field="parallelism.pipeline_parallel_schedule",
        )
    if p > 1 and schedule == _SCHEDULES[True]:
        named = shape if isinstance(shape, str) else None
        layers = (source.layers_of(named) if named else (shape or {}).get("num_hidden_layers")) or p
        parallel["virtual_pipeline_parallel_size"] = _chunks_per_rank(
            split, stages=p, layers=layers
        )
    training = {
        "sequence_length": _degree(batch, "seq_len", default=2048),
        "global_batch_size": global_batch,
        "precision": _read_precision(model, batch, section("float8"), reading),
        "framework": "torch-fsdp",
    }
    if batch.get("dtype", "float32") == "bfloat16":
        training |= dict.fromkeys(
            ("parameter_precision", "gradient_precision", "optimizer_precision"), "bf16"
        )
    reading.query = {
        "kind": "training",
        **({"model": shape} if shape else {}),
        "training": training,
        "parallel": parallel,
    }


def _chunks_per_rank(split: dict[str, Any], *, stages: int, layers: int) -> int:
    """Return the number of model chunks per rank: from layers_per_stage, or 2 by default."""
    if "pipeline_parallel_layers_per_stage" not in split:
        return 2
    ends = sum(
        _degree(split, f"pipeline_parallel_{end}_stage_less_layers", least=0, default=1)
        for end in ("first", "last")
    )
    return max(
        -(-(layers + ends) // _degree(split, "pipeline_parallel_layers_per_stage")) // stages, 1
    )


def _degree(section: dict[str, Any], name: str, *, default: int = 1, least: int = 1) -> int:
    value = section.get(name, default)
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < least
        or (value == 0 and least != 0)
    ):
        raise InputError(f"{name} must be a whole number, got {value!r}", field=name)
    return value


def _read_precision(
    model: dict[str, Any], batch: dict[str, Any], float8: dict[str, Any], reading: Reading
) -> str:
    """Return the precision set by the converters, or by the switches of release 0.1."""
    listed = model.get("converters", [])
    converters = {
        _OLDER_CONVERTERS.get(name, name)
        for name in (listed.split(",") if isinstance(listed, str) else listed)
    }
    if float8.get("enable_float8_linear") is True:
        converters.add("quantize.linear.float8")
    for name in sorted(
        converters - {each for converter_names in _CONVERTERS.values() for each in converter_names}
    ):
        reading.refused.append(f"model.converters {name}: is not modelled")
    for ours, theirs in _CONVERTERS.items():
        if theirs and set(theirs) <= converters:
            return ours
    for key in ("mixed_precision_param", "dtype"):
        if (kind := batch.get(key, "float32")) not in ("float32", "bfloat16"):
            reading.refuse(f"training.{key} {kind} is not supported; supported: float32, bfloat16")
    return "fp32" if batch.get("mixed_precision_param", "bfloat16") == "float32" else "bf16"


def _read_recompute(section: dict[str, Any]) -> str:
    mode, option = section.get("mode", "selective"), str(section.get("selective_ac_option", "2"))
    if mode in ("none", "full"):
        return "none" if mode == "none" else "per_layer"
    if mode == "selective" and option == "op":
        return "per_op"
    raise UnsupportedError(
        f"activation_checkpoint {mode} {option} is not supported; supported: none, "
        "full, or selective with option op",
        field="activation_checkpoint.mode",
    )


def _read_zero_stage(
    split: dict[str, Any], reading: Reading, *, sharded: bool, pipelined: bool
) -> int:
    """Return ZeRO stage 3 if FSDP reshards after the forward pass, else 2 or lower.

    With pipeline parallelism, the default is 2, because stage 3 would all-gather for every
    micro-batch.
    """
    if not sharded:
        return 0
    policy = split.get("fsdp_reshard_after_forward", "default")
    if policy not in ("default", "always", "never"):
        reading.refuse(
            f"parallelism.fsdp_reshard_after_forward {policy} is not supported; "
            "supported: default, always, never"
        )
    return 2 if policy == "never" or (policy == "default" and pipelined) else 3


register(
    Format(
        name="torchtitan",
        signs=(
            Sign(
                place="text",
                rank=10,
                matches=matches_pattern(
                    r"(?m)^[ "
                    r"\t]*\[(parallelism|training|model|job|optimizer|activation_checkpoint)\][ "
                    r"\t]*(#.*)?$"
                ),
            ),
            Sign(
                place="script",
                rank=70,
                matches=matches_pattern(r"--job\.config_file|--model\.flavor"),
            ),
        ),
        read=read,
        write=toml_file,
        options=lambda setup: key_values(config(setup)),
        usual_of="torch-fsdp",
        framework="torch-fsdp",
        fsdp_axes={"zero_stage": (2, 3)},
        logs=("torchtitan",),
        file="torchtitan.toml",
        reads="the TOML file of torchtitan 0.1 and 0.2 (for 0.3, use `torchtitan-python`)",
        writes="torchtitan's TOML file, for models that torchtitan defines",
        checked="torchtitan 0.2.2's ConfigManager and ParallelDims on 8 to 1,024 processes; read "
        "back by `import`",
    )
)
