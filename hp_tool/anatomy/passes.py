"""Which part of a stage's time for one micro-batch is forward pass, and which part of the backward pass may run later."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.anatomy.stages import StageAnatomy
from hp_tool.cost.block import LayerTime
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.pipeline_stages import whole_pipeline
from hp_tool.cost.step_time import micro_batches
from hp_tool.cost.training import model_layers
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.training.problem import TrainingProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds of one micro-batch on one rank, all its model chunks together."""

    forward_s: float
    backward_s: float
    """For the inputs, recomputation included; the rest of it in weight_gradient_s, where the schedule splits them."""
    weight_gradient_s: float


def passes(*, problem: TrainingProblem, config: ParallelConfig, stage: StageAnatomy) -> Passes:
    """The stage's seconds, divided as those of its layers are.

    The ends (embedding, output layer) and waits for the host are divided alike; recomputation is backward.
    """
    layer = _pacing_layer(problem, config)
    forward = weight = 0.0
    for name, ahead, back in (
        ("compute", layer.forward, layer.backward),
        ("tensor_parallel", layer.tensor, layer.tensor_backward),
        ("context_parallel", layer.context, layer.context_backward),
        ("expert_parallel", layer.expert, layer.expert_backward),
    ):
        both = float(ahead + back)
        if both:
            forward += stage.parts_s[name] * float(ahead) / both
    if layer.forward + layer.backward:
        weight = stage.parts_s["compute"] * float(layer.weight_gradient) / float(layer.forward + layer.backward)
    busy = sum(stage.parts_s.values())
    stretch = stage.seconds / busy if busy else 1.0
    return Passes(
        forward_s=stretch * forward, backward_s=stretch * (busy - forward - weight), weight_gradient_s=stretch * weight
    )


def _pacing_layer(problem: TrainingProblem, config: ParallelConfig) -> LayerTime:
    """The mean layer of the stage that sets the pace."""
    candidate = Candidates.alone(config)
    return model_layers(
        case=problem,
        candidates=candidate,
        pipeline=whole_pipeline(problem, candidate),
        micro_batches=micro_batches(candidate, workload=problem.workload),
    ).time
