"""What data parallelism adds to a step: the communication of gradients and weights that compute does not hide."""

from __future__ import annotations

from hp_tool.cost.arrays import Floats, anywhere, maximum, minimum, where
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.model_states import StateTimes
from hp_tool.domain.efficiency import EfficiencyProfile


def data_parallel_seconds(
    *,
    profile: EfficiencyProfile,
    candidates: Candidates,
    states: StateTimes,
    micro_batches: Floats,
    forward: Floats,
    stage: Floats,
    layers: Floats,
) -> Floats:
    """Exposed seconds of gradients and weights in one step.

    ZeRO 0 and 1: gradients once, after the last micro-batch, weights once; what hides them is one micro-batch on the
    stage, its own exposed communication included, which uses other links. ZeRO 2: gradients after every micro-batch's
    backward pass, weights behind one forward pass. ZeRO 3: weights are gathered for every forward and backward pass.
    Replicas of hybrid sharding all-reduce once, with the last micro-batch, behind what its reduction leaves of the stage.
    """
    overlap = profile.framework.data_parallel_overlap
    once = states.reduce_s + states.gather_s
    zero = candidates.zero_stage
    replicated = profile.framework.all_reduce_overlap
    alone = (zero == 0) & (candidates.pipeline_parallel_size == 1)
    share: Floats = overlap if replicated is None else where(alone, replicated, overlap)
    total = exposed(once, behind=stage, overlap=share)
    if anywhere(zero >= 2):
        reduce, gather, backward = states.reduce_s, states.gather_s, stage - forward
        each = fully_sharded_seconds(
            gather=gather, reduce=reduce, forward=forward, backward=backward, layers=layers, overlap=overlap
        )
        gradients = micro_batches * exposed(reduce, behind=backward, overlap=overlap)
        weights = exposed(gather, behind=forward, overlap=overlap)
        total = where(zero >= 3, micro_batches * each, where(zero == 2, gradients + weights, total))
        once = where(zero >= 3, 2.0 * gather + reduce, once)
    if anywhere(states.replica_s > 0.0):
        total = total + exposed(states.replica_s, behind=maximum(stage - once, 0.0), overlap=overlap)
    return total + states.tied_reduction_s


def fully_sharded_seconds(
    *, gather: Floats, reduce: Floats, forward: Floats, backward: Floats, layers: Floats, overlap: float
) -> Floats:
    """Exposed seconds of ZeRO 3 in one micro-batch, whose weights are gathered for either pass and whose gradients are
    reduced behind the backward one (arXiv 2304.11277 section 3.3).

    Layer by layer, the gather of the next one hides behind the running one; the first gather of a pass, and the last
    reduction, have nothing to hide behind: of the L layers' communication at most the share (L - 1) / L is hidden.
    """
    hidden = overlap * maximum(1.0 - 1.0 / layers, 0.0)
    return exposed(gather, behind=forward, overlap=hidden) + exposed(gather + reduce, behind=backward, overlap=hidden)


def exposed(seconds: Floats, *, behind: Floats, overlap: Floats) -> Floats:
    """What is left of communication that runs beside `behind` seconds of compute, of which the share `overlap` is used."""
    return seconds - overlap * minimum(seconds, behind)
