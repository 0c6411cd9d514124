"""Where a step's seconds go: parts that sum to it. Real steps are taken apart in test_agreement and
test_native.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.components


@pytest.fixture(autouse=True, scope="module")
def _torch() -> None:
    """Not on import: every process of pytest-xdist would load it."""
    pytest.importorskip("torch")


times = st.floats(-0.5, 1.5)
intervals = st.lists(st.tuples(times, times), max_size=6)


@given(compute=intervals, reduces=intervals, sends=intervals)
def test_parts_sum_to_the_step_and_none_is_negative(compute, reduces, sends):
    from hp_tool.cluster.profiler.steps import split_step

    found = split_step(
        whole=(0.0, 1.0),
        compute=compute,
        communication={"all_reduce": reduces, "send_receive": sends},
    )
    assert sum(found.values()) == pytest.approx(1.0)
    assert min(found.values()) >= -1e-12


def test_hidden_communication_costs_nothing():
    from hp_tool.cluster.profiler.steps import split_step

    found = split_step(
        whole=(0.0, 10.0),
        compute=[(0, 4), (3, 6)],
        communication={"all_reduce": [(5, 8)], "all_gather": [(1, 2)]},
    )
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
    from hp_tool.cluster.profiler.steps import communication_kind

    assert communication_kind(name) == kind
