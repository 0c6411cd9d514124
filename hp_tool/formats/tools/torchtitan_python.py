"""Read and write torchtitan 0.3's configuration functions in Python."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from hp_tool.domain.setups import TrainingSetup
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.python_calls import Call, Functions, Unread
from hp_tool.formats.reading import (
    Ignored,
    Reading,
    Setting,
    hyphenated,
    key_values,
    look_up,
    sort_settings,
    table,
)
from hp_tool.formats.registry import Format, register
from hp_tool.formats.signs import Sign, matches_pattern
from hp_tool.formats.source import Source
from hp_tool.formats.tools import torchtitan
from hp_tool.formats.writing import headline

TOOL = "torchtitan 0.3"
CONFIG_CLASS = "Trainer.Config"
FLAVORS = torchtitan.FLAVORS | {
    "llama-3.2-1b": ("llama3", "1B"),
    "llama-3.2-3b": ("llama3", "3B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
}
"""(package in torchtitan.models, flavor) by catalogue name."""
_CONVERTERS = {
    "Float8LinearConverter": "quantize.linear.float8",
    "MXFP8LinearConverter": "quantize.linear.mx",
}
_LINEAR, _GROUPED = "LinearConverter", "GroupedExpertsConverter"
"""Suffixes of the names of converters for linear layers and for experts."""
_WHOLE_LAYERS = ({"layers"}, {"attention", "feed_forward"})
"""Values of `fqns` that select all linear layers of a transformer layer."""
_WIDE_MODULES = {"lm_head", "output", "router.gate"}
"""Modules that stay in 16 bits in every precision."""
_CHECKPOINTS = {"none": None, "selective": "SelectiveAC", "full": "FullAC"}
_LOSSES = {"BaseLoss": "unfused", "CrossEntropyLoss": "unfused", "ChunkedLossWrapper": "chunked"}
_DISPATCHERS = {"standard": "alltoall", "deepep": "flex", "hybridep": "flex"}
"""Token dispatcher for each moe_comm_backend (models/common/config_utils.py)."""
_REMOVED_KEYS = ("context_parallel_rotate_method", "expert_tensor_parallel_degree")
"""Keys in [parallelism] of 0.2 that 0.3 lacks."""
_VALUE_PREFIXES = ("training.", "parallelism.", "model_spec.")
"""Prefixes of sections that contain plain values."""
_KINDS = ("loss", "activation_checkpoint", "optimizer")
"""Sections whose class determines the meaning of their fields."""


def text(setup: TrainingSetup) -> str:
    """Return a module with a function `run` that returns the configuration.

    Raises:
        UnsupportedError: torchtitan does not support the setup.
    """
    content = config(setup)
    model, converters = content["model"], content["model"].get("converters", [])
    names = {theirs: ours for ours, theirs in _CONVERTERS.items()}
    kinds = [names[converter] for converter in converters]
    checkpoint = _CHECKPOINTS[content["activation_checkpoint"]["mode"]]
    flavor = f'"{model["flavor"]}"' + (
        f", converters=[{', '.join(f'{kind}.Config()' for kind in kinds)}]" if kinds else ""
    )
    imports = [
        "from torchtitan.components.loss import CrossEntropyLoss",
        "from torchtitan.components.optimizer import default_adamw",
        *(f"from torchtitan.components.quantization import {kind}" for kind in kinds),
        "from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig",
        *(
            (f"from torchtitan.distributed.activation_checkpoint import {checkpoint}",)
            if checkpoint
            else ()
        ),
        "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        f"from torchtitan.models.{model['name']} import model_registry",
        "from torchtitan.trainer import Trainer",
    ]
    return "\n".join(
        (
            f"# {TOOL}: {headline(setup)}",
            "# Save it as hp_run.py: torchrun ... -m torchtitan.train --module hp_run --config run",
            "# FILL IN 1: your tokenizer's folder, data, learning rate",
            *imports,
            "",
            "",
            "def run() -> Trainer.Config:",
            f"    model_spec = model_registry({flavor})",
            "    return Trainer.Config(",
            "        model_spec=model_spec,",
            '        hf_assets_path="./assets/hf",  # FILL IN 1',
            '        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),  # FILL IN 1',
            "        optimizer=default_adamw(lr=3e-4),  # FILL IN 1",
            "        "
            "loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),",
            *_section_lines("training", "TrainingConfig", content["training"]),
            *_section_lines("parallelism", "ParallelismConfig", content["parallelism"]),
            f"        activation_checkpoint={f'{checkpoint}.Config()' if checkpoint else None},",
            "        compile=CompileConfig(enable=False),",
            "    )",
            "",
        )
    )


def _section_lines(name: str, kind: str, content: dict[str, Any]) -> tuple[str, ...]:
    rows = (
        f"            {key}={json.dumps(value) if isinstance(value, str) else value},"
        for key, value in content.items()
    )
    return (f"        {name}={kind}(", *rows, "        ),")


def config(setup: TrainingSetup) -> dict[str, Any]:
    """Return the sections of the configuration, with the keys of 0.2's file.

    Raises:
        UnsupportedError: 0.3 does not support the setup.
    """
    expressed = torchtitan.EXPRESSED_FIELDS | {"cross_entropy", "cuda_graphs"}
    content = torchtitan.config(setup, tool=TOOL, expressed=expressed, flavors=FLAVORS)
    c, w = setup.parallel, setup.workload
    if c.expert_tensor_parallel_size > 1:
        raise UnsupportedError(
            f"{TOOL} does not support expert tensor parallelism; set "
            "parallel.expert_tensor_parallel_size to 1",
            field="parallel.expert_tensor_parallel_size",
        )
    if (
        c.context_parallel_size > 1
        and setup.strategy.context_parallel_communication != "all_gather"
    ):
        raise UnsupportedError(
            f"{TOOL} all-gathers keys and values; set parallel.context_parallel_communication "
            "to all_gather",
            field="parallel.context_parallel_communication",
        )
    if w.loss != "unfused":
        raise UnsupportedError(
            f"{TOOL} does not support training.cross_entropy {w.loss}; set it to unfused",
            field="training.cross_entropy",
        )
    if w.cuda_graphs and (c.pipeline_parallel_size > 1 or c.expert_parallel_size > 1):
        raise UnsupportedError(
            f"{TOOL} does not record CUDA graphs with pipeline or expert parallelism",
            field="training.cuda_graphs",
        )
    for name in _REMOVED_KEYS:
        del content["parallelism"][name]
    content["training"]["disable_cuda_graphs"] = not w.cuda_graphs
    if c.tensor_parallel_size > 1:
        content["parallelism"]["enable_sequence_parallel"] = c.sequence_parallel
    return content


def read(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of a configuration function.

    Raises:
        InputError: The file is invalid.
        UnsupportedError: A setting is not modelled.
    """
    functions = Functions(source.text)
    name = _select_function(functions, source.variables.get("CONFIG"))
    trainer = functions.value(name)
    if not isinstance(trainer, Call) or trainer.name != CONFIG_CLASS:
        shown = (
            trainer.text
            if isinstance(trainer, Unread)
            else trainer.name
            if isinstance(trainer, Call)
            else repr(trainer)
        )
        raise UnsupportedError(
            f"{name} returns {shown}; the resulting {CONFIG_CLASS} is only known at run time",
            field="config",
        )
    arguments = table("torchtitan-python")
    settings = []
    for setting in _call_settings(trainer, prefix=""):
        argument = look_up(setting.name, arguments)
        if setting.unknown and argument is not None and argument.fate == "read":
            reading.refuse(
                f"{setting.written} (line {setting.line}): {setting.text} is only known at "
                "run time; write its value instead"
            )
        else:
            settings.append(setting)
    sort_settings(settings, table=arguments, reading=reading, spare=source.ignore)
    if reading.refused:
        return
    if "MMDataLoader" in _names_of_calls(functions, trainer.arguments.get("dataloader")):
        why = "images count as tokens of the sequence; the image encoder is not modelled"
        reading.ignored.append(
            Ignored(flag="dataloader MMDataLoader", reason=why, line=trainer.line)
        )
    sections = {
        section: _plain_values(trainer.arguments.get(section))
        for section in ("training", "parallelism")
    }
    if any(name in sections["training"] for name in _TOKEN_BATCH_KEYS):
        _convert_batch_to_rows(sections["training"], sections["parallelism"], reading)
    spec = trainer.arguments.get("model_spec")
    kind = spec.name if isinstance(spec, Call) else "none"
    if kind != "model_registry":
        raise UnsupportedError(
            f"model_spec is {kind}; only model_registry(...) is supported", field="model_spec"
        )
    assert isinstance(spec, Call)
    converters, with_experts, nvfp4 = _read_converters(spec, reading)
    flavor = str(_read_flavor(spec))
    family = functions.modules.get("model_registry", "").removeprefix("torchtitan.models.")
    if family.startswith("."):
        family = _family_in_names((name, *functions.names_returning(CONFIG_CLASS)), flavor)
        if not family:
            reading.add_missing(
                "model",
                f"the file does not name the package of model_registry({flavor!r}); add",
                example="NAME",
            )
    model = {
        "name": family,
        "flavor": flavor,
        "converters": [_CONVERTERS.get(converter, converter) for converter in converters],
    }
    checkpoint = _class_name(trainer.arguments, "activation_checkpoint", default="SelectiveAC")
    mode = next((mode for mode, ours in _CHECKPOINTS.items() if ours == checkpoint), checkpoint)
    recompute = {"mode": mode, "selective_ac_option": "op"}
    loss = _class_name(trainer.arguments, "loss", default="BaseLoss")
    if loss not in _LOSSES:
        raise UnsupportedError(
            f"loss {loss} is not supported; supported: {', '.join(_LOSSES)}", field="loss"
        )
    tables = {**sections, "model": model, "activation_checkpoint": recompute}
    torchtitan.read_sections(tables, source=source, reading=reading, flavors=FLAVORS, release="0.3")
    training, parallel = reading.query["training"], reading.query["parallel"]
    if nvfp4:
        training["precision"] = "nvfp4"
    shape = reading.query.get("model")
    experts = (
        source.num_experts_of(shape)
        if isinstance(shape, str)
        else (shape or {}).keys() & {"num_experts", "n_routed_experts", "num_local_experts"}
    )
    if (converters or nvfp4) and experts and not with_experts:
        reading.refuse("model_spec.converters: experts that stay in 16 bits are not modelled")
    backend = spec.arguments.get("moe_comm_backend") or "standard"
    if backend not in _DISPATCHERS:
        reading.refuse(
            f"model_spec.moe_comm_backend {backend} is not supported; supported: "
            f"{', '.join(_DISPATCHERS)}"
        )
    elif experts:
        parallel["moe_token_dispatcher_type"] = _DISPATCHERS[backend]
    training["cross_entropy"] = _LOSSES[loss]
    training["cuda_graphs"] = sections["training"].get("disable_cuda_graphs") is not True
    parallel["sequence_parallel"] &= (
        sections["parallelism"].get("enable_sequence_parallel") is not False
    )


_TOKEN_BATCH_KEYS = (
    "num_tokens_per_microbatch_per_dp_rank",
    "num_tokens_per_train_step",
    "max_context_length",
)
"""Arguments of TrainingConfig in releases after 0.3, which measure batches in tokens."""


def _convert_batch_to_rows(
    training: dict[str, Any], split: dict[str, Any], reading: Reading
) -> None:
    """Convert batch sizes in tokens to numbers of sequences of maximum length."""
    forward, step, row = (
        training.pop(name, default)
        for name, default in zip(_TOKEN_BATCH_KEYS, (16384, -1, 2048), strict=True)
    )
    microbatches = split.pop("num_pp_microbatches", 1)
    if not all(isinstance(each, int) for each in (forward, step, row, microbatches)):
        return  # Values that are known only at run time were rejected before.
    if row < 1 or forward % row or (step != -1 and step % row):
        reading.refuse(
            f"num_tokens_per_microbatch_per_dp_rank {forward} is not a multiple of "
            f"max_context_length {row}"
        )
        return
    micro = forward // row
    if split.get("pipeline_parallel_degree", 1) == 1:
        microbatches = 1
    split["pipeline_parallel_microbatch_size"] = micro
    training |= {"seq_len": row, "local_batch_size": micro * microbatches}
    if step != -1:
        training["global_batch_size"] = step // row


def _select_function(functions: Functions, wanted: str | None) -> str:
    """Return the name of the configuration function to read.

    Raises:
        InputError: No function has this name, or there are several candidates.
    """
    names = functions.names_returning(CONFIG_CLASS)
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted in names:
        return str(wanted)
    raise InputError(
        f"no function returns {CONFIG_CLASS}"
        if not names
        else (
            f"the file has {len(names)} configurations; name one with --var CONFIG=...: "
            f"{', '.join(names[:40])}"
        ),
        field="config",
    )


def _family_in_names(names: Sequence[str], flavor: str) -> str:
    """Return the model package that function names imply; empty if ambiguous.

    A file may import model_registry from its own package and never contain the package's name. A
    longer match may be another package: qwen35_4b is a function of qwen3_5.
    """
    pairs = [*FLAVORS.values(), *torchtitan.models_by_flavor()]

    def families(name: str, flavors: Collection[str] | None = None) -> set[str]:
        plain = name.removeprefix("sft_")
        return {
            family
            for family, each in pairs
            if (flavors is None or each in flavors)
            and f"{plain}_".startswith(
                tuple(
                    f"{word}_{_flavor_in_function_name(each)}_"
                    for word in (family, _without_digit_separator(family))
                )
            )
        }

    found = families(names[0], (flavor,)) or {
        family for name in names[1:] for family in families(name)
    }
    return found.pop() if len(found) == 1 else ""


def _flavor_in_function_name(flavor: str) -> str:
    return "_".join(re.findall("[a-z0-9]+", flavor.lower()))


def _without_digit_separator(family: str) -> str:
    """Return a package name without underscores between digits: qwen35 for qwen3_5."""
    return re.sub(r"(\d)_(\d)", r"\1\2", family)


def _read_converters(spec: Call, reading: Reading) -> tuple[list[str], bool, bool]:
    """Return the converters of linear layers, and whether they include experts and NVFP4."""
    calls = {
        each.name.removesuffix(".Config"): each.arguments
        for each in spec.arguments.get("converters") or []
    }
    linear = [name for name in calls if not name.endswith(_GROUPED)]
    grouped = {name.removesuffix(_GROUPED) for name in calls if name.endswith(_GROUPED)}
    for kind in sorted(grouped - {name.removesuffix(_LINEAR) for name in linear}):
        reading.refuse(f"model_spec.converters {kind}{_GROUPED}: experts alone are not modelled")
    for name, arguments in calls.items():
        chosen, left = arguments.get("fqns"), arguments.get("filter_fqns")
        converts_all = chosen is None or (
            isinstance(chosen, list)
            and any(each <= set(map(str, chosen)) for each in _WHOLE_LAYERS)
        )
        skips_few = left is None or (
            isinstance(left, list) and set(map(str, left)) <= _WIDE_MODULES
        )
        if not (converts_all and skips_few):
            reading.refuse(f"model_spec.converters {name}: part of the matrices is not modelled")
        if arguments.get("emulate") is True:
            reading.refuse(f"model_spec.converters {name}: emulation is not modelled")
    nvfp4 = "NVFP4LinearConverter"
    return [name for name in linear if name != nvfp4], bool(grouped), nvfp4 in linear


def _names_of_calls(functions: Functions, value: Any) -> str:
    """Return the names of the calls in an argument, or the source of the function that it calls."""
    return (
        f"{functions.function_source(value.name)} {value.name}"
        if isinstance(value, Call)
        else (
            functions.function_source(value.text.partition("(")[0])
            if isinstance(value, Unread)
            else ""
        )
    )


def _read_flavor(spec: Call) -> Any:
    return spec.words[0] if spec.words else spec.arguments.get("flavor")


def _class_name(arguments: dict[str, Any], section: str, *, default: str) -> str | None:
    value = arguments.get(section, Call(name=default, line=0))
    return value.name.removesuffix(".Config") if isinstance(value, Call) else value


def _plain_values(section: Any) -> dict[str, Any]:
    return dict(section.arguments) if isinstance(section, Call) else {}


def _call_settings(call: Call, *, prefix: str) -> Iterator[Setting]:
    """Yield the arguments of a call as settings with dotted names."""
    arguments = dict(call.arguments)
    if call.name == "model_registry" and call.words:
        arguments["flavor"] = call.words[0]
    for key, value in arguments.items():
        yield from _leaf_settings(f"{prefix}{key}", value, line=call.line)


def _leaf_settings(name: str, value: Any, *, line: int) -> Iterator[Setting]:
    if isinstance(value, Call) and value.name and name.startswith(_VALUE_PREFIXES):
        value = Unread(text=f"{value.name}(...)", line=value.line)
    if isinstance(value, Call):
        if name in _KINDS or name not in _SECTIONS:
            yield _setting(name, [value.name or "..."], line=value.line)
        yield from _call_settings(value, prefix=f"{name}.")
        return
    items = value if isinstance(value, list) else [value]
    yield _setting(name, items, line=line)
    calls = [item for item in items if isinstance(item, Call)]
    for key in dict.fromkeys(key for call in calls for key in call.arguments):
        values = dict.fromkeys(
            str(_value_text(call.arguments[key])) for call in calls if key in call.arguments
        )
        yield _setting(f"{name}.{key}", list(values), line=line)


_SECTIONS = (
    "model_spec",
    "training",
    "parallelism",
    "compile",
    "comm",
    "debug",
    "profiler",
    "metrics",
    "tokenizer",
    "dataloader",
    "lr_scheduler",
    "checkpoint",
    "validator",
)


def _setting(name: str, items: list[Any], *, line: int) -> Setting:
    unread = [item for item in items if isinstance(item, Unread)]
    return Setting(
        name=hyphenated(name),
        written=name,
        values=tuple(_value_text(item) for item in items),
        line=unread[0].line if unread else line,
        unknown=tuple(each.text for each in unread),
    )


def _value_text(value: Any) -> str:
    if isinstance(value, Call | Unread):
        return value.name if isinstance(value, Call) else value.text
    return (
        {None: "null", True: "true", False: "false"}.get(value, str(value))
        if not isinstance(value, list)
        else str(value)
    )


register(
    Format(
        name="torchtitan-python",
        title="torchtitan, as Python",
        signs=(
            Sign(
                place="text",
                rank=9,
                matches=matches_pattern(r"(?m)^from torchtitan\b[^\n]* import|\bTrainer\.Config\("),
            ),
        ),
        read=read,
        write=text,
        options=lambda setup: key_values(config(setup)),
        framework="torch-fsdp",
        fsdp_axes={
            "zero_stage": (2, 3),
            "context_parallel_communication": "all_gather",
            "expert_tensor_parallel_size": 1,
        },
        logs=("torchtitan",),
        reads="a Python configuration function of torchtitan 0.3, selected by `--var "
        "CONFIG=NAME` if the file has several; nothing is executed",
        writes="a Python module with one function, for `--module` and `--config`, for models "
        "that torchtitan defines",
        checked="fields and choices recorded from torchtitan 0.3.0's classes; read back by "
        "`import`",
    )
)
