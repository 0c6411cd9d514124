"""All-to-alls of one micro-batch's experts behind the opposite pass of another's: Megatron Core's
overlap_moe_expert_parallel_comm (pipeline_parallel/combined_1f1b.py). What it hides was never measured by this project: the
exposed time here is the physical bound, with every hidden byte free and no kernel slowed by its neighbour.
"""

from __future__ import annotations

from dataclasses import replace

from hp_tool.cost.block import BlockTime
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.elementwise import Column, maximum, minimum
from hp_tool.domain.workload import TrainingWorkload


def merges_passes(workload: TrainingWorkload) -> bool:
    """Whether the query asks for it."""
    return workload.overlap is not None and bool(workload.overlap.expert_parallel)


def behind_other_pass(experts: BlockTime, *, attention: BlockTime) -> BlockTime:
    """The experts' block where one micro-batch's forward pass runs merged with another's backward pass through a layer.

    Of the two all-to-alls of each pass, one runs beside the other pass's attention and one beside its experts:
    exposed = sum over both of max(a2a - compute, 0); a forward dispatch beside the experts' backward, a forward combine beside
    the attention's backward, and the backward ones beside the forward compute.
    """
    forward, backward = experts.expert / 2.0, experts.expert_backward / 2.0
    blocks = (attention, experts)
    return replace(
        experts,
        expert=sum(forward - minimum(forward, _backward_compute(block)) for block in blocks),
        expert_backward=sum(backward - minimum(backward, _forward_compute(block)) for block in blocks),
    )


def merged_share(candidates: Candidates, *, micro_batches: Column) -> Column:
    """Share of the passes that have an opposite one to run with: 1 - ((v - 1) p + 1) / (m v), which are all but the warm-up of
    the last pipeline rank, whose passes follow each other without gaps; one of m without a pipeline.
    """
    p, v = candidates.pipeline_parallel_size, candidates.virtual_pipeline_parallel_size
    return maximum(1.0 - ((v - 1.0) * p + 1.0) / (micro_batches * v), 0.0)


def _forward_compute(block: BlockTime) -> Column:
    return block.matmul + block.core + block.elementwise


def _backward_compute(block: BlockTime) -> Column:
    return block.matmul + block.weight_gradient + block.core_backward + block.elementwise_backward
