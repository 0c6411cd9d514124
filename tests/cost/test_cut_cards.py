"""Cards of a die with a part of its arithmetic cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import gpu_efficiency, usual_clocks
from hp_tool.cost.roofline import at_sustained_clocks
from hp_tool.domain.efficiency import GpuEfficiency

WHOLE = gpu("h100-sxm-80gb")


def card(cut: float) -> GpuEfficiency:
    """The H100's kernels on a card with this share of its peaks and the same power limit."""
    clocks = replace(usual_clocks(WHOLE), share={"bf16": 1.0, "fp8": 1.0})
    peaks = {name: cut * peak for name, peak in WHOLE.peak_flops_per_second.items()}
    return at_sustained_clocks(
        gpu_efficiency(WHOLE), clocks=clocks, power_w=WHOLE.power_w, peaks=peaks, reference=WHOLE
    )


@pytest.mark.parametrize("cut", [1.0, 0.5, 0.15])
def test_what_is_not_arithmetic_takes_as_long_as_on_the_whole_die(cut: float) -> None:
    """Seconds a FLOP beyond those at the peak are the whole die's, in matmuls and attention."""
    whole, small = gpu_efficiency(WHOLE), card(cut)
    for before, after in (
        (whole.matmul["bf16"], small.matmul["bf16"]),
        (whole.matmul["fp8"], small.matmul["fp8"]),
        (whole.attention, small.attention),
    ):
        lost = 1.0 / before.peak_fraction - 1.0
        assert (1.0 / after.peak_fraction - 1.0) / cut == pytest.approx(lost)


def test_more_power_than_the_peak_needs_leaves_a_full_peak() -> None:
    assert card(0.01).matmul["bf16"].peak_fraction == pytest.approx(1.0, abs=0.01)
