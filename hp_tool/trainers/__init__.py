"""Someone's own training command in place of the built-in profiler: filled in, run by any launcher, its log read."""

from hp_tool.trainers.command import check_trainer, check_varied, program_name
from hp_tool.trainers.launcher import TrainerLauncher

__all__ = ["TrainerLauncher", "check_trainer", "check_varied", "program_name"]
