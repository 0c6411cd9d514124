"""The machines of `benchmarks.learning.loop` differ from their predictions as their names say."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.learning.loop import (
    BIAS,
    STALL_FACTOR,
    STEP_OVERHEAD_S,
    TRUTHS,
    Trace,
    as_text,
    quickstart,
    true_step_s,
)

BY_NAME = {truth.name: replace(truth, scatter_log_sd=0.0) for truth in TRUTHS}


def _true(name):
    table = quickstart().search.table
    return table.parts_s, true_step_s(table, BY_NAME[name], rng=np.random.default_rng(0))


def test_only_communication_is_slower():
    parts, true_s = _true("communication x3")
    slower = ("tensor_parallel", "pipeline_p2p", "data_parallel")
    whole_s = sum(parts.values()) + 2.0 * sum(parts[name] for name in slower)
    assert true_s == pytest.approx(BIAS * whole_s)


def test_recomputation_is_slower_and_the_rest_of_compute_is_not():
    parts, true_s = _true("recompute x3, bubble x2")
    whole_s = sum(parts.values()) + 2.0 * parts["recompute"] + parts["pipeline_bubble"]
    assert true_s == pytest.approx(BIAS * whole_s)


def test_compute_doubles_beside_a_fixed_overhead():
    parts, true_s = _true("compute x2, overhead x4")
    computing = parts["compute"] + parts["recompute"] + parts["pipeline_bubble"]
    whole_s = sum(parts.values()) + computing + 4.0 * STEP_OVERHEAD_S
    assert true_s == pytest.approx(BIAS * whole_s)


def test_some_layouts_stall_and_others_do_not():
    parts, true_s = _true("15% stall x3")
    slowdown = true_s / (BIAS * sum(parts.values()))
    stalled = slowdown > 2.0
    assert slowdown[stalled] == pytest.approx(STALL_FACTOR)
    assert slowdown[~stalled] == pytest.approx(1.0)
    assert 0.05 < stalled.mean() < 0.25


def _trace(share, *, width=2.0, gain=0.0):
    return Trace(
        inside={6: share, 12: 0.9},
        measured_inside={6: share, 12: 0.9},
        widths={6: width},
        stopped_after=8,
        gain_left=gain,
        regret=0.1,
    )


def test_table_counts_the_cases_that_meet_each_aim():
    text = as_text(
        {
            ("honest", 0.02): [_trace(0.9)],
            ("wide", 0.02): [_trace(0.9, width=3.0)],
            ("blind", 0.20): [_trace(0.5, gain=0.05)],
            ("early", 0.02): [_trace(0.9, gain=0.05)],
        }
    )
    assert "true times in 3 of 4 (2 with high/low up to 2.2), further runs in 3" in text
    assert "6% (.20): 3 of 4" in text
