"""A trainer's command: looked up, checked, and filled in for a configuration. Its placeholders are

    {tensor_parallel_size}                   a value, anywhere in an argument
    {sequence_parallel?--sequence-parallel}  a whole argument, left out if the value is false, 0 or none
    {flags:megatron-lm}                      a whole argument that becomes all flags or overrides of the configuration
    {file:torchtitan}                        the name of a file with the configuration, written into the run's folder

Braces around anything that is no name stay as they are; `{{name}}` is `{name}`.
"""  # noqa: E501

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
from hp_tool.domain.exports import Export, exports
from hp_tool.domain.measurement import ProfileRequest, Program
from hp_tool.domain.parallel import OF_THE_QUERY, ParallelConfig, ParallelQuery, recompute_name
from hp_tool.domain.query import Query, Reducible, TrainerCommand
from hp_tool.domain.setups import TrainingSetup
from hp_tool.errors import HpToolError, InputError
from hp_tool.questions.training.evaluate import resolve_config
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.setup import training_setup

PLACEHOLDER = re.compile(
    r"(?<!\{)\{(?P<name>[a-z][a-z0-9_]*)(?P<rest>(?::[a-z0-9-]+)?|\?[^{}]*)\}(?!\})"
)
AXES = tuple(item.name for item in fields(ParallelConfig) if item.name not in OF_THE_QUERY)
"""Fields of a configuration that candidates may differ in."""
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
"""Limit of one argument or variable; the kernel's is 131,072."""
RESERVED = (jobs.REQUEST, "result.json", "job.json", "job.log", "job.sbatch", "rendezvous.py")
_FILE = re.compile(r"[a-zA-Z0-9._-]{1,128}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_COLUMNS = {"recompute": ("recompute_method", "recompute_num_layers", "recompute_modules")}
"""The columns of candidates for an axis that is no column itself."""
_DERIVED = ("data_parallel_size",)
"""Axes that follow from the others and the number of devices."""


def special() -> dict[str, Export]:
    """Return the exports that a command may name: those of flags as `flags:NAME`, those of files as
    `file:NAME`.
    """
    training = exports()
    flags = {
        f"flags:{each.flags_name or each.name}": each for each in training if each.flags is not None
    }
    return flags | {f"file:{each.name}": each for each in training if each.file is not None}


def _followed(what: Reducible) -> tuple[str, ...]:
    """Return what a command has to name something of in order to follow a reduction; few formats
    say the model's shape.
    """
    if what == "layers":
        says = {
            name: each.says_shape or (name.startswith("flags:") and each.fewer_layers)
            for name, each in special().items()
        }
        return ("num_hidden_layers", *filter(says.get, says))
    return ("global_batch_size", "gradient_accumulation_steps", *special())


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredTrainer:
    """What a registered trainer is to whoever submits searches. Its command and environment are the
    administrator's.
    """

    name: str
    """What `trainer` of a query names it by."""
    reader: str
    launch: str
    axes: tuple[str, ...] | None
    """What it can vary, by fields of `parallel`; None: whatever a query leaves open."""
    reducible: tuple[Reducible, ...]
    """What `search.fidelity: auto` may leave out of its runs."""
    source: str
    """Where it comes from, as its file says."""


def registered_trainers() -> list[RegisteredTrainer]:
    """All registered trainers, by name. Raises InputError for a mistake in one's file."""
    listed = []
    for entry in library.entries("trainers"):
        command = _command(entry)
        shown = {name: getattr(command, name) for name in ("reader", "launch", "axes", "reducible")}
        listed.append(RegisteredTrainer(name=entry.name, source=entry.source, **shown))
    return listed


def registered_trainer(name: str, *, field: str = "trainer") -> TrainerCommand:
    """The command registered by this name: an entry of `trainers` in one's own catalogue folders.

    It says what a worker runs, so it comes from files alone. Raises NotFoundError, and InputError
    for a mistake in it.
    """
    return _command(library.entry("trainers", name, field=field))


def _command(entry: library.Entry) -> TrainerCommand:
    return records.build(TrainerCommand, entry.fields, field="trainer", origin=entry.path)


def trainer_of(query: Query) -> TrainerCommand | None:
    """The query's own command, or the registered one that it names."""
    return registered_trainer(query.trainer) if isinstance(query.trainer, str) else query.trainer


def check_trainer(trainer: TrainerCommand) -> None:
    """Raise InputError for a command that cannot be run, with the field and the fix."""
    command = trainer.command
    if not command or not command[0]:
        raise InputError(
            "trainer.command is empty; give the program and its arguments as a list",
            field="trainer.command",
        )
    if len(command) > MAX_ARGUMENTS or any(
        len(each) > MAX_CHARACTERS or "\0" in each for each in command
    ):
        raise InputError(
            f"trainer.command may have {MAX_ARGUMENTS} arguments of {MAX_CHARACTERS:,} characters, "
            "none of them NUL",
            field="trainer.command",
        )
    if PLACEHOLDER.search(command[0]):
        raise InputError(
            "trainer.command must begin with the program's own name", field="trainer.command"
        )
    for name, value in trainer.environment.items():
        if not _VARIABLE.fullmatch(name) or len(value) > MAX_CHARACTERS or "\0" in value:
            raise InputError(
                f"trainer.environment: {name[:80]!r} cannot be a variable",
                field="trainer.environment",
            )
    file = trainer.metrics_file
    if file is not None and (not _FILE.fullmatch(file) or file in (".", "..") or file in RESERVED):
        raise InputError(
            "trainer.metrics_file must be a name of letters, digits, . _ and - in the run's "
            "folder, and not one of ours",
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
        if not tells(trainer, axis):
            raise InputError(
                f"trainer.axes: the command cannot vary {axis}: name {{{axis}}} in it, or leave "
                f"{axis} out",
                field="trainer.axes",
            )
    named = set(placeholders(command))
    for what in trainer.reducible:
        if named.isdisjoint(followed := _followed(what)):
            raise InputError(
                f"trainer.reducible: the command cannot follow fewer {what}: name "
                f"{{{followed[0]}}} in it, or leave {what} out",
                field="trainer.reducible",
            )


def check_varied(trainer: TrainerCommand, candidates: Candidates) -> None:
    """Raise InputError if candidates differ in an axis that the command does not name: their runs
    would be the same.
    """
    for axis in AXES:
        columns = _COLUMNS.get(axis, (axis,))
        varied = (
            any(np.ptp(getattr(candidates, column)) > 0 for column in columns)
            if len(candidates)
            else False
        )
        if varied and axis not in _DERIVED and not tells(trainer, axis):
            raise InputError(
                f"the candidates differ in {axis}, which trainer.command does not name: add "
                f"{{{axis}}} or "
                f"{{{next(iter(special()))}}} to it, fix parallel.{axis} to one value, or leave "
                f"{axis} out of trainer.axes",
                field="trainer.command",
                code="missing_field",
            )


def varying(parallel: ParallelQuery, *, trainer: TrainerCommand, framework: str) -> ParallelQuery:
    """Return a query's `parallel` with one value of each axis that the trainer leaves out of its
    `axes`.

    Raises InputError where the query gives several.
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
                f"the trainer does not vary {axis} (trainer.axes): give one value",
                field=f"parallel.{axis}",
                code="fixed_axis",
            )
        if value is None:
            fixed[axis] = getattr(usual, axis)
    return replace(parallel, **fixed)


def tells(trainer: TrainerCommand, axis: str) -> bool:
    """Whether the command names the axis, or an export, which has the whole configuration or is an
    error.
    """
    return any(
        name == axis or name.startswith(("flags:", "file:"))
        for name in placeholders(trainer.command)
    )


def writes(trainer: TrainerCommand, *, problem: TrainingProblem, parallel: ParallelConfig) -> bool:
    """Return whether the command has an export that says all of the configuration, and every one
    that it has does.
    """
    named = {name: special()[name] for name in placeholders(trainer.command) if ":" in name}
    setup = training_setup(problem, parallel)
    try:
        for name, each in named.items():
            write = each.flags if name.startswith("flags:") else each.write
            assert write is not None  # `special` names no other
            write(setup)
    except HpToolError:
        return False
    return bool(named)


def program_name(trainer: TrainerCommand) -> str:
    """The script or module, else the program, under which measurements are stored."""
    command = trainer.command
    scripts = [word for word in command if word.endswith(".py")]
    module = command[command.index("-m") + 1] if "-m" in command[:-1] else None
    name = PurePosixPath(module or (scripts[0] if scripts else command[0])).name
    return re.sub(r"[^a-zA-Z0-9._-]", "-", name)[:64]


def program(
    trainer: TrainerCommand, *, request: ProfileRequest, problem: TrainingProblem
) -> Program:
    """The program of this request. Pure. Raises UnsupportedError if an export does not support the
    configuration.
    """
    named = {name: special()[name] for name in placeholders(trainer.command) if ":" in name}
    reduced = replace(
        problem, model=request.model, workload=request.training
    )  # of a reduced run less than the problem
    setup = training_setup(reduced, request.parallel) if named else None
    files = {name: each for name, each in named.items() if name.startswith("file:")}
    values = _values(request, num_nodes=-(-request.num_gpus // problem.cluster.gpus_per_node))
    values |= {name: each.file for name, each in files.items()}
    command: list[str] = []
    for argument in trainer.command:
        whole = PLACEHOLDER.fullmatch(argument)
        if setup is not None and whole is not None and whole["name"] == "flags":
            command += _flags(
                named[whole[0][1:-1]],
                setup,
                fewer_layers=request.fidelity.num_hidden_layers is not None,
            )
        elif (word := _filled(argument, values)) is not None:
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
            values[name]: each.write(setup)
            for name, each in files.items()
            if each.write is not None and setup is not None
        },
    )


def _flags(export: Export, setup: TrainingSetup, *, fewer_layers: bool) -> list[str]:
    assert export.flags is not None  # `special` names no other
    more = export.fewer_layers(setup) if fewer_layers and export.fewer_layers is not None else []
    return export.flags(setup) + more


def placeholders(command: tuple[str, ...]) -> Iterator[str]:
    """The names of a command's placeholders, in order; `flags:` and `file:` with their format.

    Raises InputError for an unknown one, with the nearest name, and for one that must be a whole
    argument but is not.
    """
    for argument in command:
        for match in PLACEHOLDER.finditer(argument):
            name, rest = match["name"], match["rest"]
            whole = name + (rest if rest.startswith(":") else "")
            if whole not in (NAMES if ":" not in whole else special()):
                near = difflib.get_close_matches(whole, [*NAMES, *special()], n=1, cutoff=0.5)
                hint = (
                    f"did you mean {{{near[0]}}}?"
                    if near
                    else f"known: {', '.join([*NAMES, *special()])}"
                )
                raise InputError(
                    f"trainer.command: unknown placeholder {match[0]}; {hint}",
                    field="trainer.command",
                    code="unknown_key",
                )
            if (rest.startswith("?") or name == "flags") and match[0] != argument:
                raise InputError(
                    f"trainer.command: {match[0]} must be a whole argument, not part of "
                    f"{argument[:80]!r}",
                    field="trainer.command",
                )
            yield whole


def _values(request: ProfileRequest, *, num_nodes: int) -> dict[str, Any]:
    """The values of all names, other than flags and files."""
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


def _filled(argument: str, values: Mapping[str, Any]) -> str | None:
    """Return an argument with its values filled in; None if it is left out."""
    whole = PLACEHOLDER.fullmatch(argument)
    if whole is not None and whole["rest"].startswith("?"):
        return whole["rest"][1:] if values[whole["name"]] not in (False, 0, None, "none") else None

    def text(match: re.Match[str]) -> str:
        value = values[match["name"] + match["rest"]]
        return str(value).lower() if isinstance(value, bool) else str(value)

    return re.sub(r"\{(\{[a-z][a-z0-9_:?-]*\})\}", r"\1", PLACEHOLDER.sub(text, argument))
