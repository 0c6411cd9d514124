"""Write setups: options, header comments, and errors for settings that a tool does not support."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from hp_tool.domain.blocks import Block
from hp_tool.domain.declared import allow_any_value, setting_words, undeclared_fields
from hp_tool.domain.frameworks import framework_facts
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.setups import ServingSetup, TrainingSetup
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.stated_release import release_words

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""torch dtype names by query precision. Most tools use these names."""
Values = Mapping[str, bool | int | float | str | list[str] | None]
"""Values by option. True means a switch that is on; None and False are omitted."""


def option_words(values: Values) -> dict[str, list[str]]:
    """Return the words of each option that is set."""

    def words(value: int | float | str | list[str]) -> list[str]:
        if isinstance(value, list):
            return value
        return [] if value is True else [f"{value:g}" if isinstance(value, float) else str(value)]

    return {
        name: words(value)
        for name, value in values.items()
        if value is not None and value is not False
    }


def headline(setup: TrainingSetup | ServingSetup) -> str:
    """Return a setup's header comment: `llama-3-8b on 64 x h100-sxm-80gb, megatron-core 0.18`."""
    name = setup.model.name + (
        f" without {setup.model.left_out[:100]}" if setup.model.left_out else ""
    )
    release = release_words(setup.workload)
    text = (
        f"{name} on {setup.cluster.num_gpus} x {setup.cluster.gpu.name}{release and f', {release}'}"
    )
    return "".join(c if c.isprintable() else " " for c in text)[:200]


def model_name_argument(name: str) -> str:
    """Return a model's name for a command line.

    Raises:
        InputError: The name looks like an option, or spans several lines.
    """
    if name.startswith("-") or not name.isprintable():
        raise InputError(
            f"the model name {name[:80]!r} starts with a dash, or contains a line break "
            "or control character; rename it",
            field="model.name",
        )
    return name


SHAPE_FIELDS = frozenset(
    {f.name for f in fields(ModelSpec)} | {f"blocks.{f.name}" for f in fields(Block)}
)
"""Fields that a tool expresses together: by the model's name, or in the code of a training script.
"""


def trains_in_16_bits(setup: TrainingSetup) -> bool:
    """Return True if the optimizer updates 16-bit weights directly, without an fp32 master copy."""
    w = setup.workload
    precisions = (w.parameter_precision, w.gradient_precision, w.optimizer_precision)
    return (
        framework_facts(w.framework).pure_states
        and w.lora is None
        and w.precision in ("bf16", "fp16")
        and all(each in (None, w.precision) for each in precisions)
        and w.master_precision in (None, "none")
    )


def reject_inexpressible(
    setup: TrainingSetup | ServingSetup,
    *,
    tool: str,
    expressed: Collection[str],
    runs: str | None = None,
) -> None:
    """Reject the first non-default setting that the tool cannot express.

    `expressed` contains the fields that the export supports. `runs` is the tool's only framework.
    New fields are rejected until the export supports them.

    Raises:
        UnsupportedError: The tool cannot express a setting.
    """
    workload = setup.workload
    kind = "training" if isinstance(setup, TrainingSetup) else "inference"
    if runs is not None and isinstance(workload, TrainingWorkload) and workload.framework != runs:
        raise UnsupportedError(
            f"{tool} trains with {runs}, but this configuration was chosen for "
            f"{workload.framework}; set training.framework: {runs} and rank again",
            field="training.framework",
        )
    sections: tuple[tuple[str, Any], ...] = (
        ("model", setup.model),
        (kind, workload),
        ("parallel", setup.parallel),
        *((("parallel", setup.strategy),) if isinstance(setup, TrainingSetup) else ()),
        ("cluster", setup.cluster),
    )
    for section, spec in sections:
        for path, value in undeclared_fields(
            spec, section=section, declared=allow_any_value(expressed)
        ):
            raise UnsupportedError(
                f"{tool} has no setting for {setting_words(path, value)}; choose another "
                "format, or remove it",
                field=path,
            )
