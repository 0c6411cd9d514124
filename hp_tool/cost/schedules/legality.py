"""Which configurations each pipeline schedule can run."""

from __future__ import annotations

from hp_tool.cost.arrays import BoolArray, IntArray, anywhere
from hp_tool.cost.candidates import DUALPIPE, GPIPE, ONE_F_ONE_B, ZB_H1, ZBV, Candidates
from hp_tool.domain.parallel import ParallelConfig


def schedule_broken(c: Candidates, *, num_layers: int, micro_batches: IntArray) -> BoolArray | bool:
    """Whether the schedule's own rule is broken, see RULES; 1F1B's and interleaving's are kept elsewhere."""
    schedule = c.pipeline_schedule
    if not anywhere(schedule):
        return False
    p, v, m = c.pipeline_parallel_size, c.virtual_pipeline_parallel_size, micro_batches
    uneven = num_layers % (p * v) != 0
    broken: BoolArray = (schedule != ONE_F_ONE_B) & (
        (p < 2)
        | ((schedule == GPIPE) & (v != 1))
        | ((schedule == ZB_H1) & ((v != 1) | (m < p)))
        | ((schedule == ZBV) & ((v != 2) | (m < 2 * p - 1) | uneven))
        | ((schedule == DUALPIPE) & ((v != 1) | (p % 2 != 0) | (m % 2 != 0) | (m < 2 * p) | uneven))
    )
    return broken


RULES = {
    "gpipe": "one model chunk per rank",
    "zb-h1": "one model chunk per rank and at least pipeline_parallel_size micro-batches",
    "zbv": "two model chunks per rank of equally many layers, and at least 2 pipeline_parallel_size - 1 micro-batches",
    "dualpipe": "one model chunk per rank, equally many layers on each, an even pipeline_parallel_size, and an even number of "
    "micro-batches, at least 2 pipeline_parallel_size",
}
"""What each schedule wants besides two pipeline stages or more."""


def least_micro_batches(config: ParallelConfig) -> int:
    """Micro-batches below which the schedule does not fill."""
    p = config.pipeline_parallel_size
    return {"zb-h1": p, "zbv": 2 * p - 1, "dualpipe": 2 * p}.get(config.pipeline_schedule or "", 1)


def schedule_rule(config: ParallelConfig, *, num_layers: int, micro_batches: int) -> str:
    """The rule of the configuration's schedule in words, and what the configuration has."""
    p, v = config.pipeline_parallel_size, config.virtual_pipeline_parallel_size
    return (
        f"pipeline_schedule {config.pipeline_schedule} needs at least 2 stages, {RULES[config.pipeline_schedule or 'gpipe']}; "
        f"here pipeline_parallel_size is {p}, virtual_pipeline_parallel_size {v}, num_hidden_layers {num_layers}, "
        f"micro-batches {micro_batches}: change one of them, or leave pipeline_schedule out"
    )
