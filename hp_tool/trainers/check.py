"""Whether a trainer's command can be searched: asked before a search is stored, and when its candidates are known."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import numpy as np

from hp_tool.cost.candidates import Candidates
from hp_tool.domain.query import TrainerCommand
from hp_tool.errors import InputError
from hp_tool.trainers import placeholders
from hp_tool.trainers.placeholders import FLAGS

MAX_ARGUMENTS = 1000
MAX_CHARACTERS = 32_768
"""Of one argument or variable; the kernel takes 131,072."""
RESERVED = ("request.json", "result.json", "job.json", "job.log", "job.sbatch")
_FILE = re.compile(r"[a-zA-Z0-9._-]{1,128}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_COLUMNS = {
    "recompute": ("recompute_method", "recompute_num_layers", "recompute_modules"),
}
"""Columns of the candidates behind an axis that is no column itself."""
_FOLLOWS = ("data_parallel_size",)
"""Axes that follow from the others and the number of devices."""


def check_trainer(trainer: TrainerCommand) -> None:
    """Raises InputError for a command that cannot be run, with the field and the mend."""
    command = trainer.command
    if not command or not command[0]:
        raise InputError("trainer.command is empty; give the program and its arguments as a list", field="trainer.command")
    if len(command) > MAX_ARGUMENTS or any(len(each) > MAX_CHARACTERS or "\0" in each for each in command):
        raise InputError(
            f"trainer.command may have {MAX_ARGUMENTS} arguments of {MAX_CHARACTERS:,} characters, none of them NUL",
            field="trainer.command",
        )
    if placeholders.PLACEHOLDER.search(command[0]):
        raise InputError("trainer.command must begin with the program's own name", field="trainer.command")
    for name, value in trainer.environment.items():
        if not _VARIABLE.fullmatch(name) or len(value) > MAX_CHARACTERS or "\0" in value:
            raise InputError(f"trainer.environment: {name[:80]!r} cannot be a variable", field="trainer.environment")
    file = trainer.metrics_file
    if file is not None and (not _FILE.fullmatch(file) or file in (".", "..") or file in RESERVED):
        raise InputError(
            "trainer.metrics_file must be a name of letters, digits, . _ and - in the run's folder, and no file of ours",
            field="trainer.metrics_file",
        )
    tuple(placeholders.found(command))


def check_varied(trainer: TrainerCommand, candidates: Candidates) -> None:
    """Raises InputError where candidates differ in what the command does not name: all of them would be the same run."""
    named = set(placeholders.found(trainer.command))
    if any(name.startswith(("flags:", "file:")) for name in named):
        return  # a configuration's export says all of it, or refuses
    for axis in placeholders.AXES:
        columns = _COLUMNS.get(axis, (axis,))
        varied = any(np.ptp(getattr(candidates, column)) > 0 for column in columns) if len(candidates) else False
        if varied and axis not in named and axis not in _FOLLOWS:
            raise InputError(
                f"the candidates differ in {axis}, which trainer.command does not say: add {{{axis}}} or "
                f"{{flags:{FLAGS[0]}}} to it, or fix parallel.{axis} to one value",
                field="trainer.command",
                code="missing_field",
            )


def program_name(trainer: TrainerCommand) -> str:
    """The script or module, else the program: what its measurements are filed under."""
    command = trainer.command
    scripts = [word for word in command if word.endswith(".py")]
    module = command[command.index("-m") + 1] if "-m" in command[:-1] else None
    name = PurePosixPath(module or (scripts[0] if scripts else command[0])).name
    return re.sub(r"[^a-zA-Z0-9._-]", "-", name)[:64]
