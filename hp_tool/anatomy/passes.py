"""Which part of a stage's time for one micro-batch is forward pass, and which part of the backward pass may run later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hp_tool.anatomy.stages import StageAnatomy
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.encoder_decoder import mean_layer_time
from hp_tool.cost.layer import LayerTime, layer_time
from hp_tool.cost.schedules.costs import splits_backward
from hp_tool.cost.stages import stage_layers
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.problem import TrainingProblem


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
    layer = _mean_layer(problem, Candidates.alone(config))
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


def _mean_layer(problem: TrainingProblem, candidate: Candidates) -> LayerTime:
    """The layer that paces the pipeline; where layers with and without experts mix, by their share."""
    nouns: dict[str, Any] = {
        "model": problem.model,
        "cluster": problem.cluster,
        "workload": problem.workload,
        "profile": problem.profile,
        "candidates": candidate,
        "strategy": problem.strategy,
    }
    if problem.model.architecture == "encoder_decoder":
        return mean_layer_time(**nouns)
    split = bool(splits_backward(candidate))
    dense = layer_time(**nouns, split_backward=split)
    if not problem.model.num_experts:
        return dense
    sparse = layer_time(**nouns, split_backward=split, moe=True)
    share = stage_layers(problem.model, candidate, framework=problem.workload.framework).pace_moe_fraction
    names = LayerTime.__slots__
    return LayerTime(**{n: getattr(dense, n) + share * (getattr(sparse, n) - getattr(dense, n)) for n in names})
