"""Published runs asked as users ask: model, GPUs, precision, batch and layout, without or with a recipe's name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from benchmarks.accuracy.heldout import Case
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.workload import TrainingWorkload

SAID = ("sequence_length", "global_batch_size", "precision", "framework", "task", "lora")
"""Keys of `training` that a plain question names."""
LAYOUT = (
    "tensor_parallel_size", "pipeline_parallel_size", "virtual_pipeline_parallel_size", "context_parallel_size",
    "expert_parallel_size", "expert_tensor_parallel_size", "micro_batch_size", "sequence_parallel", "zero_stage", "recompute",
)  # fmt: skip
"""Keys of `parallel` that it names."""


def plain_cases(cases: Iterable[Case], *, recipe: str | None = None) -> list[Case]:
    """Return the cases with every other knob left open; `recipe` names one to fill them."""
    return [_plain(case, recipe) for case in cases]


def _plain(case: Case, recipe: str | None) -> Case:
    whole, layout = case.query.training, case.query.parallel
    assert whole is not None
    training = TrainingWorkload(**{name: getattr(whole, name) for name in SAID}, recipe=recipe)
    parallel = ParallelQuery(**{name: getattr(layout, name) for name in LAYOUT})
    query = dataclasses.replace(case.query, training=training, parallel=parallel)
    return dataclasses.replace(case, query=query)
