"""A trainer's command with one configuration filled in."""

from __future__ import annotations

from hp_tool.domain.measurement import ProfileRequest, Program
from hp_tool.domain.query import TrainerCommand
from hp_tool.exchange import exports
from hp_tool.formats import megatron_lm
from hp_tool.trainers import placeholders
from hp_tool.trainers.placeholders import FILES
from hp_tool.training.problem import TrainingProblem


def program(trainer: TrainerCommand, *, request: ProfileRequest, problem: TrainingProblem) -> Program:
    """What runs for this request. Pure. Raises UnsupportedError where an export cannot say the configuration."""
    wanted = set(placeholders.found(trainer.command))
    setup = exports.training_setup(problem, request.parallel) if any(":" in name for name in wanted) else None
    files = {name: name_of for name, name_of in FILES.items() if f"file:{name}" in wanted}
    given = placeholders.values(request, num_nodes=problem.cluster.num_nodes)
    command: list[str] = []
    for argument in trainer.command:
        if argument == "{flags:megatron-lm}":
            assert setup is not None  # it is wanted
            for flag, words in megatron_lm.flags(setup).items():
                command += [f"--{flag}", *words]
        elif (word := placeholders.filled(argument, given, names_of_files=files)) is not None:
            command.append(word)
    return Program(
        command=tuple(command),
        torchrun=trainer.launch == "torchrun",
        environment=trainer.environment,
        returns=() if trainer.metrics_file is None else (trainer.metrics_file,),
        files={name_of: exports.TRAINING[name](setup) for name, name_of in files.items() if setup is not None},
    )
