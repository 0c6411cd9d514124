"""From a budget to a training: scaling laws, shapes, starting hyperparameters. Pure formulas with sources."""

from hp_tool.sizing.hyperparameters import batch_sequences, hyperparameter_flops, starting_hyperparameters
from hp_tool.sizing.laws import LAWS, ScalingLaw, compute_overhead, loss, over_trained
from hp_tool.sizing.shapes import active_parameters, shape_choices, shaped

__all__ = [
    "LAWS",
    "ScalingLaw",
    "active_parameters",
    "batch_sequences",
    "compute_overhead",
    "hyperparameter_flops",
    "loss",
    "over_trained",
    "shape_choices",
    "shaped",
    "starting_hyperparameters",
]
