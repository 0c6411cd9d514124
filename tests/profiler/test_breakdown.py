"""Where a step's seconds go: parts that sum to it, of made intervals and of a real step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.profiler.requests import LLAMA
from tests.profiler.together import run_together

torch = pytest.importorskip("torch")

times = st.floats(-0.5, 1.5)
intervals = st.lists(st.tuples(times, times), max_size=6)


@given(compute=intervals, reduces=intervals, sends=intervals)
def test_parts_sum_to_the_step_and_none_is_negative(compute, reduces, sends):
    from hp_tool.profiler.breakdown import parts

    found = parts(whole=(0.0, 1.0), compute=compute, communication={"all_reduce": reduces, "send_receive": sends})
    assert sum(found.values()) == pytest.approx(1.0)
    assert min(found.values()) >= -1e-12


def test_hidden_communication_costs_nothing():
    from hp_tool.profiler.breakdown import parts

    found = parts(whole=(0.0, 10.0), compute=[(0, 4), (3, 6)], communication={"all_reduce": [(5, 8)], "all_gather": [(1, 2)]})
    assert found == {"compute": 6.0, "all_gather": 0.0, "all_reduce": 2.0, "idle": 2.0}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gloo:all_reduce", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce_scatter"),
        ("nccl:_all_gather_base", "all_gather"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_receive"),
        ("gloo:barrier", "other_communication"),
        ("aten::mm", None),
        ("sm90_xmma_gemm_bf16bf16", None),
    ],
)
def test_kinds_of_communication(name, kind):
    from hp_tool.profiler.breakdown import communication_kind

    assert communication_kind(name) == kind


@pytest.mark.distributed
def test_a_real_step_is_taken_apart(tmp_path):
    tp2: dict[str, Any] = {"tensor_parallel_size": 2}
    cases = {
        "megatron": {"model": LLAMA, "parallel": tp2, "breakdown": True},
        "native": {
            "model": LLAMA,
            "parallel": {**tp2, "zero_stage": 3},
            "training": {"framework": "torch-fsdp"},
            "breakdown": True,
        },
    }
    for measurement in run_together(tmp_path, processes=2, cases=cases).values():
        found = measurement.breakdown_s
        assert found is not None and {"compute", "all_reduce", "idle"} <= found.keys()
        assert min(found["compute"], found["all_reduce"]) > 0 and min(found.values()) >= 0
        assert sum(found.values()) > 0.5 * min(measurement.step_times_s)
