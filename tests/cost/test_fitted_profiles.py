"""The fitted constants that ship: physical, traceable, and honest where nobody measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hp_tool.catalog import gpu, names
from hp_tool.catalog.efficiency import efficiency_profile, frameworks, gpu_efficiency
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions.training import estimate

MEASURED = {
    "a100-sxm-40gb": "a100",
    "a100-sxm-80gb": "a100",
    "a800": "a100",
    "h100": "h100",
    "h200": "h100",
    "h20": "h100",
    "b200-sxm-180gb": "b200",
    "gb200": "b200",
}


@pytest.mark.parametrize("name", MEASURED)
def test_measured_gpus_have_physical_constants_and_name_their_rows(name: str) -> None:
    found = gpu_efficiency(gpu(name))
    assert found.gpu == MEASURED[name] and found.measured and "python -m" in found.fitted_on
    for roof in (*found.matmul.values(), found.attention):
        assert 0.05 < roof.peak_fraction <= 1.0 and 0.05 < roof.bandwidth_fraction <= 1.0
        assert 0 < roof.overhead_s < 1e-3
    for link in (found.nvlink, found.all_to_all):
        assert (
            0.1 < link.bandwidth_fraction <= 1.0
            and link.latency_s >= 0
            and link.latency_per_peer_s >= 0
        )
    assert set(found.matmul) <= set(gpu(name).peak_flops_per_second)


def test_every_gpu_of_the_catalogue_has_a_profile(subtests: pytest.Subtests) -> None:
    for name in names("gpus"):
        with subtests.test(name=str(name)):
            found = efficiency_profile(gpu=gpu(name), framework="megatron-core")
            assert found.gpu.gpu == (gpu(name).silicon or "generic")
            assert found.gpu.measured == (
                found.gpu.gpu not in ("generic", "v100", "mi300x", "mi355x")
            )


def test_an_unmeasured_gpu_borrows_generic_constants() -> None:
    found = efficiency_profile(gpu=gpu("l40s-48gb"), framework="megatron-core").gpu
    assert (found.gpu, found.measured) == ("generic", False)


def test_a_gpu_of_ones_own_may_name_its_silicon() -> None:
    card = replace(gpu("b200"), name="my-b200", silicon="b200")
    assert efficiency_profile(gpu=card, framework="megatron-core") == efficiency_profile(
        gpu=gpu("b200"), framework="megatron-core"
    )
    with pytest.raises(InputError, match="did you mean 'b200'") as caught:
        efficiency_profile(gpu=replace(card, silicon="b2000"), framework="megatron-core")
    assert caught.value.field == "cluster.gpu.silicon"


def test_no_profile_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(UnsupportedError, match=frameworks()[0]):
        efficiency_profile(gpu=gpu("a100-sxm-80gb"), framework="no-such-framework")


def test_framework_constants_are_shares_and_say_their_rows() -> None:
    found = efficiency_profile(gpu=gpu("a100-sxm-80gb"), framework="megatron-core").framework
    for share in (
        found.tensor_parallel_overlap,
        found.data_parallel_overlap,
        found.pipeline_overlap,
    ):
        assert 0.0 <= share <= 1.0
    assert 0.0 < found.network.bandwidth_fraction <= 1.0
    assert found.matmul_slowdown >= 1.0 and found.optimizer_traffic_factor >= 1.0
    assert found.time_log_sd > 0 and found.memory_log_sd > 0
    assert "Tables 4 and 5" in found.fitted_on


def _on(device: str) -> Estimate:
    """A small model on one device. A GPU of one's own has no measurements."""
    spec = (
        replace(gpu("h100-sxm-80gb"), name="my-gpu", silicon=None) if device == "my-gpu" else device
    )
    query = Query(
        kind="training",
        model="gpt3-1.3b",
        cluster=ClusterQuery(gpu=spec, num_gpus=1),
        training=TrainingWorkload(
            sequence_length=2048, global_batch_size=4, framework_version="26.04", cuda_graphs=False
        ),
        parallel=ParallelQuery(recompute="full"),
    )
    return estimate(query=query)


def test_borrowed_constants_widen_the_time_interval_and_are_marked() -> None:
    measured, borrowed = _on("h100-sxm-80gb"), _on("my-gpu")
    assert measured.provenance["gpu_efficiency_measured"] is True
    assert borrowed.provenance["gpu_efficiency_measured"] is False
    assert measured.intervals and borrowed.intervals and measured.time and borrowed.time
    widths = [
        math.log(one.intervals.step_s[1] / one.intervals.step_s[0])
        for one in (measured, borrowed)
        if one.intervals
    ]
    assert widths[1] > 1.4 * widths[0]


def test_intervals_hold_the_prediction_and_name_their_source() -> None:
    found = _on("h100-sxm-80gb")
    assert found.intervals and found.time and found.memory
    low, high = found.intervals.step_s
    assert low < found.time.step_s < high
    low, high = found.intervals.memory_total_bytes
    assert low < found.memory.total_bytes < high
    assert found.intervals.confidence == 0.9 and found.intervals.source
