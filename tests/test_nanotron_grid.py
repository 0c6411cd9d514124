"""The fit of nanotron's constants: what it finds in runs made from known ones, and its limits on
the published grid.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.accuracy import fit_nanotron as grid
from benchmarks.accuracy.data import Row, folder_named
from benchmarks.accuracy.fit_nanotron import FIXED, fit
from benchmarks.accuracy.grid_rows import SEQUENCE, grid_rows, groups

TRUE = dataclasses.replace(
    FIXED,
    host_launch_s=2e-4,
    host_pipeline_stall_s=1.5e-3,
    matmul_slowdown=1.4,
    temporaries_fraction=0.3,
    workspace_bytes=5e8,
    queued_inputs=60.0,
)


def made(*, slow: int = 0) -> list[Row]:
    """Runs as TRUE predicts them with 3% of scatter, and of each eight the first `slow` ten times
    slower.
    """
    sizes = [
        (nodes, tp, pp, mbs)
        for nodes in (1, 2, 8)
        for tp in (1, 4, 8)
        for pp in (1, 2)
        for mbs in (1, 4)
        if tp * pp <= 8 * nodes and 8 * nodes // (tp * pp) * mbs <= 256
    ]
    rows: list[Row] = []
    for nodes, tp, pp, mbs in sizes:
        dp = 8 * nodes // (tp * pp)
        values = {
            "nodes": nodes,
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "mbs": mbs,
            "grad_acc": 256 // (dp * mbs),
            "gbs": 256,
            "zero": 1,
        }
        rows.append(
            {"model": "1B", "variant": "mha", "status": "ok", "tok_s_gpu": "1", "mem_gb": "1"}
            | {name: str(value) for name, value in values.items()}
        )
    noise = np.random.default_rng(0)
    for group in groups(rows):
        found = group.predict(TRUE)
        for index, row in enumerate(group.rows):
            factor = float(np.exp(noise.normal(0.0, 0.03))) * (10.0 if index % 8 < slow else 1.0)
            row["tok_s_gpu"] = str(
                256 * SEQUENCE / (found.step_s[index] * factor * group.cluster.num_gpus)
            )
            row["mem_gb"] = str(found.first_stage_bytes[index] / 2**30)
    return rows


@pytest.mark.parametrize("slow", [0, 1])
def test_known_constants_are_found_again_though_some_runs_are_ten_times_slower(slow: int) -> None:
    found = fit(rows=made(slow=slow))
    assert found.host_launch_s == pytest.approx(TRUE.host_launch_s, rel=0.05)
    assert found.host_pipeline_stall_s == pytest.approx(TRUE.host_pipeline_stall_s, rel=0.1)
    assert found.temporaries_fraction == pytest.approx(TRUE.temporaries_fraction, rel=0.1)
    assert found.queued_inputs == pytest.approx(TRUE.queued_inputs, rel=0.1)
    assert found.fitted_on.startswith(f"{len(made())} runs of nanotron (1B)")


def test_failed_runs_teach_nothing() -> None:
    rows = made()
    failed = [{**row, "status": "failed", "tok_s_gpu": "", "mem_gb": ""} for row in rows[:5]]
    assert fit(rows=rows + failed) == fit(rows=rows)


@pytest.mark.components
def test_limits_on_the_published_grid_by_constants_of_the_other_model() -> None:
    found = grid.summary(grid.leave_out_models(grid_rows(folder_named())))
    assert found["ran_but_refused_share"] <= 0.005
    assert found["failed_called_infeasible_share"] >= 0.85
    assert found["throughput_median_error"] <= 0.15
    assert found["rank_correlation_median"] >= 0.88
    assert 0.85 <= found["throughput_within_interval_share"] <= 0.95
    assert 0.85 <= found["memory_within_interval_share"] <= 0.95
