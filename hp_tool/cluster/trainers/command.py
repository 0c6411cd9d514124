"""A trainer's command: look it up, check it, and fill in a configuration.

Placeholders:

    {tensor_parallel_size}                   a value, anywhere in an argument
    {sequence_parallel?--sequence-parallel}  an entire argument, omitted if the value is false, 0 or
    none
    {flags:megatron-lm}                      an entire argument, replaced by all flags or overrides
    of the configuration
    {file:torchtitan}                        the name of a file with the configuration, written to
    the run's folder

Braces around other text are left unchanged. `{{name}}` stands for a literal `{name}`.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from hp_tool.catalog import library, records
from hp_tool.cluster.launchers import jobs
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.exports import Export, list_exports
from hp_tool.domain.measurement import ProfileRequest, Program
from hp_tool.domain.parallel import (
    QUERY_STRATEGY_FIELDS,
    ParallelConfig,
    ParallelQuery,
    recompute_name,
)
from hp_tool.domain.query import Query, Reducible, TrainerCommand
from hp_tool.domain.setups import TrainingSetup
from hp_tool.errors import HpToolError, InputError
from hp_tool.questions.training.evaluate import resolve_config
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.setup import training_setup
from hp_tool.questions.training.with_recipe import changed_settings

PLACEHOLDER = re.compile(
    r"(?<!\{)\{(?P<name>[a-z][a-z0-9_]*)(?P<rest>(?::[a-z0-9-]+)?|\?[^{}]*)\}(?!\})"
)
AXES = tuple(item.name for item in fields(ParallelConfig) if item.name not in QUERY_STRATEGY_FIELDS)
"""Fields in which candidates may differ."""
_MODEL = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
_TRAINING = ("sequence_length", "global_batch_size", "precision")
_RUN = (
    "num_gpus",
    "num_nodes",
    "gpus_per_node",
    "gradient_accumulation_steps",
    "train_iters",
    "steps",
    "warmup_steps",
    "seed",
)
NAMES = (*AXES, *_MODEL, *_TRAINING, *_RUN)
MAX_ARGUMENTS = 1000
MAX_CHARACTERS = 32_768
"""Maximum number of characters in an argument or variable. The kernel's limit is 131,072."""
RESERVED = (jobs.REQUEST, "result.json", "job.json", "job.log", "job.sbatch", "rendezvous.py")
_FILE = re.compile(r"[a-zA-Z0-9._-]{1,128}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_COLUMNS = {"recompute": ("recompute_method", "recompute_num_layers", "recompute_modules")}
"""Candidate columns of axes whose column has another name."""
_DERIVED = ("data_parallel_size",)
"""Axes that are determined by other axes and the number of devices."""


def export_placeholders() -> dict[str, Export]:
    """Return the exports that a command may use, by placeholder (`flags:NAME` or `file:NAME`)."""
    training = list_exports()
    flags = {
        f"flags:{export.flags_name or export.name}": export
        for export in training
        if export.flags is not None
    }
    return flags | {f"file:{export.name}": export for export in training if export.file is not None}


def _reduction_placeholders(what: Reducible) -> tuple[str, ...]:
    """Return the placeholders that apply a reduction. A command needs at least one of them."""
    if what == "layers":
        has_shape = {
            name: export.says_shape or (name.startswith("flags:") and export.fewer_layers)
            for name, export in export_placeholders().items()
        }
        return ("num_hidden_layers", *filter(has_shape.get, has_shape))
    return ("global_batch_size", "gradient_accumulation_steps", *export_placeholders())


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredTrainer:
    """A registered trainer, without the administrator's command and environment."""

    name: str
    """Name that a query's `trainer` uses."""
    reader: str
    launch: str
    axes: tuple[str, ...] | None
    """Fields of `parallel` that the trainer can vary; None for all that a query leaves open."""
    reducible: tuple[Reducible, ...]
    """Reductions of a run that `search.fidelity: auto` may use."""
    source: str
    """Source that the trainer's file states."""


def registered_trainers() -> list[RegisteredTrainer]:
    """Return all registered trainers, sorted by name. Raise InputError for an invalid file."""
    trainers = []
    for entry in library.entries("trainers"):
        command = _build_command(entry)
        shown = {name: getattr(command, name) for name in ("reader", "launch", "axes", "reducible")}
        trainers.append(RegisteredTrainer(name=entry.name, source=entry.source, **shown))
    return trainers


def registered_trainer(name: str, *, field: str = "trainer") -> TrainerCommand:
    """Return the command registered under `name` in `trainers` of the catalogue folders.

    Workers execute it, so it is read only from files, never from a request.

    Raises:
        NotFoundError: No trainer has this name.
        InputError: Its file is invalid.
    """
    return _build_command(library.entry("trainers", name, field=field))


def _build_command(entry: library.Entry) -> TrainerCommand:
    return records.build(TrainerCommand, entry.fields, field="trainer", origin=entry.path)


def trainer_of(query: Query) -> TrainerCommand | None:
    """Return the query's own command, or the registered command that the query names."""
    return registered_trainer(query.trainer) if isinstance(query.trainer, str) else query.trainer


def check_trainer(trainer: TrainerCommand) -> None:
    """Raise InputError for a command that cannot run."""
    command = trainer.command
    if not command or not command[0]:
        raise InputError(
            "trainer.command is empty. Give the program and its arguments as a list.",
            field="trainer.command",
        )
    if len(command) > MAX_ARGUMENTS or any(
        len(argument) > MAX_CHARACTERS or "\0" in argument for argument in command
    ):
        raise InputError(
            f"trainer.command may have at most {MAX_ARGUMENTS} arguments of {MAX_CHARACTERS:,} "
            "characters without NUL.",
            field="trainer.command",
        )
    if PLACEHOLDER.search(command[0]):
        raise InputError(
            "trainer.command must begin with the program's name.", field="trainer.command"
        )
    for name, value in trainer.environment.items():
        if not _VARIABLE.fullmatch(name) or len(value) > MAX_CHARACTERS or "\0" in value:
            raise InputError(
                f"trainer.environment: {name[:80]!r} is not a valid variable.",
                field="trainer.environment",
            )
    file = trainer.metrics_file
    if file is not None and (not _FILE.fullmatch(file) or file in (".", "..") or file in RESERVED):
        raise InputError(
            "trainer.metrics_file must be a file name of letters, digits, . _ and - in the run's "
            "folder, and not a reserved name.",
            field="trainer.metrics_file",
        )
    for axis in trainer.axes or ():
        if axis not in AXES:
            near = difflib.get_close_matches(axis, AXES, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(AXES)}"
            raise InputError(
                f"trainer.axes: unknown axis {axis[:80]!r}; {hint}",
                field="trainer.axes",
                code="unknown_key",
            )
        if not uses_axis(trainer, axis):
            raise InputError(
                f"trainer.axes: the command cannot vary {axis}. Add {{{axis}}} to it, or remove "
                f"{axis}.",
                field="trainer.axes",
            )
    used = set(placeholders(command))
    for what in trainer.reducible:
        if used.isdisjoint(followed := _reduction_placeholders(what)):
            raise InputError(
                f"trainer.reducible: the command cannot run fewer {what}. Add "
                f"{{{followed[0]}}} to it, or remove {what}.",
                field="trainer.reducible",
            )


def check_varied(trainer: TrainerCommand, candidates: Candidates) -> None:
    """Raise InputError if candidates differ in an axis that the command does not use."""
    for axis in AXES:
        columns = _COLUMNS.get(axis, (axis,))
        varied = (
            any(np.ptp(getattr(candidates, column)) > 0 for column in columns)
            if len(candidates)
            else False
        )
        if varied and axis not in _DERIVED and not uses_axis(trainer, axis):
            raise InputError(
                f"The candidates differ in {axis}, which trainer.command does not use. Add "
                f"{{{axis}}} or {{{next(iter(export_placeholders()))}}} to it, fix "
                f"parallel.{axis} to one value, or remove {axis} from trainer.axes.",
                field="trainer.command",
                code="missing_field",
            )


def fix_other_axes(
    parallel: ParallelQuery, *, trainer: TrainerCommand, framework: str
) -> ParallelQuery:
    """Fix each axis that is not in the trainer's `axes` to a single value.

    Return the query's `parallel` with these values.

    Raises:
        InputError: The query lists several values for such an axis.
    """
    if trainer.axes is None:
        return parallel
    usual = resolve_config(ParallelQuery(), num_gpus=1, framework=framework)
    fixed: dict[str, Any] = {}
    for axis in AXES:
        value = getattr(parallel, axis)
        if axis in trainer.axes or axis in _DERIVED:
            continue
        if isinstance(value, tuple) and len(value) > 1:
            raise InputError(
                f"The trainer cannot vary {axis} (see trainer.axes). Give one value.",
                field=f"parallel.{axis}",
                code="fixed_axis",
            )
        if value is None:
            fixed[axis] = getattr(usual, axis)
    return replace(parallel, **fixed)


def uses_axis(trainer: TrainerCommand, axis: str) -> bool:
    """Return True if the command has a placeholder for the axis, or any export placeholder."""
    return any(
        name == axis or name.startswith(("flags:", "file:"))
        for name in placeholders(trainer.command)
    )


def unset_settings(
    trainer: TrainerCommand, *, problem: TrainingProblem, parallel: ParallelConfig
) -> tuple[str, ...]:
    """Return the paths of configuration settings that the command cannot set.

    If the command has no export placeholder, these are all settings that the recipe changes.
    Otherwise, it is the first setting that an export does not support.
    """
    exports = [name for name in placeholders(trainer.command) if ":" in name]
    if not exports:
        plain = problem if problem.usual is None else problem.usual.plain
        return tuple(changed_settings(before=plain, after=problem)) or ("training",)
    setup = training_setup(problem, parallel)
    for name in exports:
        export = export_placeholders()[name]
        write = export.flags if name.startswith("flags:") else export.write
        assert write is not None
        try:
            write(setup)
        except HpToolError as error:
            return (error.field or "training",)
    return ()


def program_name(trainer: TrainerCommand) -> str:
    """Return the name of the script, module or program. Measurements are stored under this name."""
    command = trainer.command
    scripts = [word for word in command if word.endswith(".py")]
    module = command[command.index("-m") + 1] if "-m" in command[:-1] else None
    name = PurePosixPath(module or (scripts[0] if scripts else command[0])).name
    return re.sub(r"[^a-zA-Z0-9._-]", "-", name)[:64]


def build_program(
    trainer: TrainerCommand, *, request: ProfileRequest, problem: TrainingProblem
) -> Program:
    """Return the program that runs a request.

    Raises:
        UnsupportedError: An export does not support the configuration.
    """
    named = {
        name: export_placeholders()[name] for name in placeholders(trainer.command) if ":" in name
    }
    # In a reduced run, the request's model or workload is smaller than the problem's.
    reduced = replace(problem, model=request.model, workload=request.training)
    setup = training_setup(reduced, request.parallel) if named else None
    files = {name: export for name, export in named.items() if name.startswith("file:")}
    values = _placeholder_values(
        request, num_nodes=-(-request.num_gpus // problem.cluster.gpus_per_node)
    )
    values |= {name: export.file for name, export in files.items()}
    command: list[str] = []
    for argument in trainer.command:
        full_match = PLACEHOLDER.fullmatch(argument)
        if setup is not None and full_match is not None and full_match["name"] == "flags":
            command += _export_flags(
                named[full_match[0][1:-1]],
                setup,
                fewer_layers=request.fidelity.num_hidden_layers is not None,
            )
        elif (word := _fill(argument, values)) is not None:
            command.append(word)
    return Program(
        command=tuple(command),
        torchrun=trainer.launch == "torchrun",
        environment=trainer.environment,
        returns=(
            *(() if trainer.metrics_file is None else (trainer.metrics_file,)),
            *((jobs.REQUEST,) if trainer.reducible else ()),
        ),
        files={
            values[name]: export.write(setup)
            for name, export in files.items()
            if export.write is not None and setup is not None
        },
    )


def _export_flags(export: Export, setup: TrainingSetup, *, fewer_layers: bool) -> list[str]:
    assert export.flags is not None
    more = export.fewer_layers(setup) if fewer_layers and export.fewer_layers is not None else []
    return export.flags(setup) + more


def placeholders(command: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of a command's placeholders; exports as `flags:NAME` and `file:NAME`.

    Raises:
        InputError: A placeholder is unknown, or one that must be an entire argument is only part of
            one.
    """
    for argument in command:
        for match in PLACEHOLDER.finditer(argument):
            name, rest = match["name"], match["rest"]
            whole = name + (rest if rest.startswith(":") else "")
            if whole not in (NAMES if ":" not in whole else export_placeholders()):
                near = difflib.get_close_matches(
                    whole, [*NAMES, *export_placeholders()], n=1, cutoff=0.5
                )
                hint = (
                    f"did you mean {{{near[0]}}}?"
                    if near
                    else f"known: {', '.join([*NAMES, *export_placeholders()])}"
                )
                raise InputError(
                    f"trainer.command: unknown placeholder {match[0]}; {hint}",
                    field="trainer.command",
                    code="unknown_key",
                )
            if (rest.startswith("?") or name == "flags") and match[0] != argument:
                raise InputError(
                    f"trainer.command: {match[0]} must be a whole argument, not part of "
                    f"{argument[:80]!r}.",
                    field="trainer.command",
                )
            yield whole


def _placeholder_values(request: ProfileRequest, *, num_nodes: int) -> dict[str, Any]:
    parallel, training, model = request.parallel, request.training, request.model
    batch = parallel.data_parallel_size * parallel.micro_batch_size
    values: dict[str, Any] = {name: getattr(parallel, name) for name in AXES}
    values |= {name: getattr(training, name) for name in _TRAINING}
    values |= {name: getattr(model, name) for name in _MODEL}
    values |= {"num_key_value_heads": model.kv_heads, "intermediate_size": model.ffn_size}
    values |= {
        "recompute": recompute_name(parallel.recompute),
        "pipeline_schedule": parallel.pipeline_schedule or "none",
    }
    values["moe_token_dispatcher_type"] = parallel.moe_token_dispatcher_type or "none"
    return values | {
        "num_gpus": request.num_gpus,
        "num_nodes": num_nodes,
        "gpus_per_node": request.num_gpus // num_nodes,
        "gradient_accumulation_steps": training.global_batch_size // batch,
        "train_iters": request.warmup_steps + request.steps,
        "steps": request.steps,
        "warmup_steps": request.warmup_steps,
        "seed": request.seed,
    }


def _fill(argument: str, values: Mapping[str, Any]) -> str | None:
    full_match = PLACEHOLDER.fullmatch(argument)
    if full_match is not None and full_match["rest"].startswith("?"):
        return (
            full_match["rest"][1:]
            if values[full_match["name"]] not in (False, 0, None, "none")
            else None
        )

    def text(match: re.Match[str]) -> str:
        value = values[match["name"] + match["rest"]]
        return str(value).lower() if isinstance(value, bool) else str(value)

    return re.sub(r"\{(\{[a-z][a-z0-9_:?-]*\})\}", r"\1", PLACEHOLDER.sub(text, argument))
