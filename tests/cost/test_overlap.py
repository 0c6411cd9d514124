"""Known overlap is said, not fitted: switches change exactly the parts they name. What runs beside
what, in which release.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import pytest

from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency_profile, gpu_efficiency
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.zero import StateTimes, data_parallel_seconds
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.switches import OVERLAPS
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions.training import estimate
from hp_tool.questions.training.releases import release_factor

PARTS = {
    "tensor_parallel": "tensor_parallel",
    "pipeline_parallel": "pipeline_p2p",
    "data_parallel": "data_parallel",
}


def step_parts(overlap: OverlapSpec | None) -> dict[str, float]:
    query = Query(
        kind="training",
        model="llama-3-70b",
        cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=128),
        training=TrainingWorkload(sequence_length=4096, global_batch_size=64, overlap=overlap),
        parallel=ParallelQuery(
            tensor_parallel_size=4, pipeline_parallel_size=4, micro_batch_size=1, recompute="full"
        ),
    )
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
    newest = efficiency_profile(gpu=gpu("h100-sxm-80gb"), framework="megatron-core").framework
    hidden = efficiency_profile(
        gpu=old, framework="megatron-core", overlap=OverlapSpec(data_parallel=True)
    ).framework
    plain = efficiency_profile(gpu=old, framework="megatron-core").framework
    assert plain.data_parallel_overlap == 0.0 < newest.data_parallel_overlap
    assert hidden == dataclasses.replace(plain, data_parallel_overlap=newest.data_parallel_overlap)


def test_what_nobody_measured_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError) as caught:
        efficiency_profile(
            gpu=gpu("h100-sxm-80gb"),
            framework="nanotron",
            overlap=OverlapSpec(context_parallel=True),
        )
    assert caught.value.field == "training.overlap.context_parallel"


def test_every_switch_has_its_constants() -> None:
    assert set(OVERLAPS) == {field.name for field in dataclasses.fields(OverlapSpec)}


def test_interleaved_chunks_exchange_beside_the_micro_batches_of_the_next() -> None:
    """All but the chunk at the end of a pass, as far as the framework hides it."""
    profile = efficiency_profile(gpu=gpu("h100-sxm-80gb"), framework="megatron-core")
    states = StateTimes(reduce_s=3.0, replica_s=0.0, gather_s=2.0, update_s=0.0)

    def exposed(chunks: int, *, zero: int = 1, run: int = 1) -> float:
        config = ParallelConfig(
            tensor_parallel_size=1,
            pipeline_parallel_size=4,
            data_parallel_size=2,
            micro_batch_size=1,
            zero_stage=zero,
            virtual_pipeline_parallel_size=chunks,
        )
        seconds = data_parallel_seconds(
            profile=profile,
            candidates=Candidates.alone(config),
            states=dataclasses.replace(states, run=run),
            micro_batches=16.0,
            forward=0.3,
            stage=1.0,
            layers=20.0,
        )
        return float(seconds)

    overlap = profile.framework.data_parallel_overlap
    assert exposed(1) == pytest.approx(5.0 - overlap * 1.0)
    assert exposed(5) == pytest.approx(5.0 - (1 - 1 / 5) * overlap * 4.0)
    # ZeRO 2: after each backward pass, or after each run of a chunk's four, of which the last is
    # followed by the weights.
    assert exposed(5, zero=2) == pytest.approx(16 * (3.0 - overlap * 0.7) + 2.0 - overlap * 0.3)
    assert exposed(5, zero=2, run=4) == pytest.approx(exposed(5) + 3 * (3.0 - overlap * 3.0))


def test_gradients_reduced_by_runs_lie_whole_for_one_chunk_or_two() -> None:
    """Llama 3.1 405B's layout: 16 stages of 8 chunks; the second chunk's backward passes begin
    while the first is reduced.
    """

    def answer(batch: int, *, reduced: Literal["run"] | None = None, **more: Any) -> Estimate:
        query = Query(
            kind="training",
            model="llama-3.1-405b",
            cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=256),
            training=TrainingWorkload(
                sequence_length=8192, global_batch_size=batch, gradient_reduction=reduced
            ),
            parallel=ParallelQuery(
                tensor_parallel_size=8,
                pipeline_parallel_size=16,
                virtual_pipeline_parallel_size=8,
                micro_batch_size=1,
                **more,
            ),
        )
        return estimate(query=query, with_fixes=False)

    def gradients(found: Estimate) -> float:
        assert found.memory is not None
        return found.memory.gradients_bytes

    whole, sharded = (gradients(answer(32, zero_stage=stage)) for stage in (1, 2))
    for batch, chunks in ((32, 1), (64, 2), (128, 2)):
        by_run = gradients(answer(batch, zero_stage=2, reduced="run"))
        assert by_run == pytest.approx(sharded + chunks / 8 * whole)
    once, by_run = answer(32, zero_stage=1).time, answer(32, zero_stage=2, reduced="run").time
    assert once is not None
    assert by_run is not None
    # One run a chunk: reduced as often as under ZeRO 1, by layers instead of buckets.
    assert by_run.parts_s["data_parallel"] == pytest.approx(once.parts_s["data_parallel"], rel=0.3)
    with pytest.raises(InputError) as caught:
        answer(32, zero_stage=1, reduced="run")
    assert caught.value.field == "training.gradient_reduction"


def test_gradients_added_up_by_kernels_of_their_own_are_read_and_written_per_micro_batch() -> None:
    """torch FSDP with fp32 gradients by hand: 32 micro-batches in runs of 16; Megatron Core adds
    within the matmul.
    """

    def optimizer_s(
        framework: str, precision: Literal["fp32", "bf16"], reduced: Literal["run"] | None
    ) -> float:
        query = Query(
            kind="training",
            model="llama-3.1-405b",
            cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=256),
            training=TrainingWorkload(
                sequence_length=8192,
                global_batch_size=64,
                gradient_reduction=reduced,
                framework=framework,
                gradient_precision=precision,
            ),
            parallel=ParallelQuery(
                tensor_parallel_size=8,
                pipeline_parallel_size=16,
                virtual_pipeline_parallel_size=8,
                micro_batch_size=1,
                zero_stage=2,
            ),
        )
        time = estimate(query=query, with_fixes=False).time
        assert time is not None
        return time.parts_s["optimizer"]

    card = gpu("h100-sxm-80gb")
    reached = gpu_efficiency(card).memory_fraction * card.memory_bandwidth_bytes_per_second
    # 126 layers on 128 chunks: the critical stage is the last, with 7 layers and the output layer.
    # Llama's layer over 8 tensor ranks: 2 x 16384^2 (queries, output), 2 x 16384 x 1024 (keys,
    # values), 3 x 16384 x 53248; two norms of 16384 on each.
    layer = (2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248) / 8 + 2 * 16384
    expected = 32 * (10 - 4 / 16) * (7 * layer + 128256 * 16384 / 8) / reached
    added = optimizer_s("torch-fsdp", "fp32", "run") - optimizer_s("torch-fsdp", "fp32", None)
    assert added == pytest.approx(expected, rel=0.01)
    assert optimizer_s("torch-fsdp", "bf16", "run") == pytest.approx(
        optimizer_s("torch-fsdp", "bf16", None), rel=0.02
    )
    assert optimizer_s("megatron-core", "fp32", "run") == pytest.approx(
        optimizer_s("megatron-core", "fp32", None), rel=0.02
    )


def test_an_earlier_release_takes_longer_by_the_trend_of_the_measured_ones() -> None:
    def asked(release: str | None, card: str = "h100-sxm-80gb") -> Estimate:
        query = Query(
            kind="training",
            model="llama-3-8b",
            cluster=ClusterQuery(gpu=card, num_gpus=8),
            training=TrainingWorkload(
                sequence_length=4096, global_batch_size=64, framework_version=release
            ),
            parallel=ParallelQuery(micro_batch_size=1),
        )
        return estimate(query=query)

    def step(release: str | None) -> float:
        found = asked(release).time
        assert found is not None
        assert sum(found.parts_s.values()) == pytest.approx(found.step_s)
        return found.step_s

    constants = efficiency_profile(gpu=gpu("h100-sxm-80gb"), framework="megatron-core").framework
    newest = constants.newest_release
    assert newest is not None
    assert newest == "26.08"
    before, months = "24.09", 23
    assert step(None) == step(newest) == step("0.12")
    assert step(before) / step(newest) == pytest.approx(
        math.exp(months / 12 * constants.yearly_gain)
    )
    # Releases that no list names yet: a year ahead at most.
    assert release_factor(constants, "27.08") == pytest.approx(math.exp(-constants.yearly_gain))
    assert release_factor(constants, "35.08") == release_factor(constants, "27.08")
    assert newest in str(asked(before).provenance["framework_version"])
    assert asked(before, "a100-sxm-80gb").time == asked(None, "a100-sxm-80gb").time, (
        "no run of 2022's constants is newer"
    )
    of_2021, of_2022 = (asked(release, "a100-sxm-80gb").time for release in ("21.04", None))
    assert of_2021 is not None and of_2022 is not None
    assert of_2021.step_s / of_2022.step_s == pytest.approx(
        math.exp(13 / 12 * constants.yearly_gain), rel=1e-3
    )
