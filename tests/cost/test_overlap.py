"""Known overlap is said, not fitted: switches change exactly the parts they name."""

from __future__ import annotations

import dataclasses

import pytest

from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.switches import OVERLAPS
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload
from hp_tool.errors import UnsupportedError
from hp_tool.training import estimate

PARTS = {"tensor_parallel": "tensor_parallel", "pipeline_parallel": "pipeline_p2p", "data_parallel": "data_parallel"}


def step_parts(overlap: OverlapSpec | None) -> dict[str, float]:
    query = Query(
        kind="training", model="llama-3-70b", cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=128),
        training=TrainingWorkload(sequence_length=4096, global_batch_size=64, overlap=overlap),
        parallel=ParallelQuery(tensor_parallel_size=4, pipeline_parallel_size=4, micro_batch_size=1, recompute="full"),
    )  # fmt: skip
    found = estimate(query=query).time
    assert found is not None
    return found.parts_s


@pytest.mark.parametrize("field", PARTS)
def test_a_switch_that_is_off_exposes_its_own_part(field: str) -> None:
    hidden, exposed = step_parts(None), step_parts(OverlapSpec(**{field: False}))
    part = PARTS[field]
    assert exposed[part] > 1.2 * hidden[part]
    for name in ("compute", "optimizer", "overhead"):
        assert exposed[name] == hidden[name]


def test_a_switch_that_is_on_is_what_this_software_does_anyway() -> None:
    assert step_parts(OverlapSpec(tensor_parallel=True, data_parallel=True)) == step_parts(None)


def test_older_software_borrows_the_newest_share() -> None:
    old = gpu("a100-sxm-80gb")
    newest = efficiency(gpu=gpu("h100-sxm-80gb"), framework="megatron-core").framework
    hidden = efficiency(gpu=old, framework="megatron-core", overlap=OverlapSpec(data_parallel=True)).framework
    plain = efficiency(gpu=old, framework="megatron-core").framework
    assert plain.data_parallel_overlap == 0.0 < newest.data_parallel_overlap
    assert hidden == dataclasses.replace(plain, data_parallel_overlap=newest.data_parallel_overlap)


def test_what_nobody_measured_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError) as caught:
        efficiency(gpu=gpu("h100-sxm-80gb"), framework="nanotron", overlap=OverlapSpec(context_parallel=True))
    assert caught.value.field == "training.overlap.context_parallel"


def test_every_switch_has_its_constants() -> None:
    assert set(OVERLAPS) == {field.name for field in dataclasses.fields(OverlapSpec)}
