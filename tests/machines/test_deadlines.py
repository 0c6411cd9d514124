"""How long a training takes on nodes that are taken back, against histories played one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hp_tool
from hp_tool.domain.result import Estimate, Intervals, TimeEstimate
from hp_tool.questions.machines.answers import NUM_QUADRATURE_NODES, deadline_probability

HISTORIES = 10_000


def histories_s(
    *, stretches: int, interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float
) -> np.ndarray:
    """(HISTORIES,) wall seconds: every stretch and every restart begins again at a failure,
    wherever that falls.
    """
    rng = np.random.default_rng(7)
    wall = np.zeros(HISTORIES)
    left = np.full(HISTORIES, stretches)
    restarting = np.zeros(HISTORIES, dtype=bool)
    while (open_ := left > 0).any():
        until = rng.exponential(mtbf_s, HISTORIES)
        needs = np.where(restarting, restart_s, interval_s + checkpoint_s)
        done = until >= needs
        wall += np.where(open_, np.where(done, needs, until), 0.0)
        left -= open_ & done & ~restarting
        restarting = ~done
    return wall


@pytest.mark.parametrize("per_day", [0.5, 4.0])
def test_days_and_the_chance_of_a_deadline_are_those_of_histories(per_day: float) -> None:
    cluster = {"gpu": "h100-sxm-80gb", "num_gpus": 16, "interruptions_per_node_day": per_day}
    workload = {
        "sequence_length": 4096,
        "global_batch_size": 128,
        "total_tokens": 2e10,
        "reliability": {"restart_s": 900.0},
    }
    layout = {"tensor_parallel_size": 2, "micro_batch_size": 1, "zero_stage": 1}
    query = {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": cluster,
        "training": workload,
        "parallel": layout,
    }
    estimate = hp_tool.estimate(query).estimate
    kept = estimate.goodput
    stretches = round(estimate.days * 86_400.0 / kept.checkpoint_interval_s)
    work_s = stretches * kept.checkpoint_interval_s  # whole stretches, as a history has them
    estimate = replace(
        estimate, days=work_s / 86_400.0, effective_days=work_s / 86_400.0 / kept.fraction
    )
    walls = histories_s(
        stretches=stretches,
        interval_s=kept.checkpoint_interval_s,
        checkpoint_s=kept.checkpoint_s,
        restart_s=kept.restart_s,
        mtbf_s=kept.mtbf_s,
    )
    assert estimate.effective_days == pytest.approx(walls.mean() / 86_400.0, rel=0.02)
    step_s = estimate.time.step_s
    sure = Intervals(
        confidence=0.9, step_s=(step_s, step_s), memory_total_bytes=(0.0, 0.0), source="known"
    )
    for quantile in (0.1, 0.3, 0.5, 0.7, 0.9):
        limit_s = float(np.quantile(walls, quantile)) + 1.0
        chance = deadline_probability(
            replace(estimate, intervals=sure), max_days=limit_s / 86_400.0
        )
        assert chance == pytest.approx(np.mean(walls <= limit_s), abs=0.02)


@pytest.mark.parametrize(
    ("effective_days", "step_s", "max_days", "chance"),
    [
        # The interval 0.8 s to 2 s of a 1 s step is 8 to 20 days. It holds 90%: 5% of trainings
        # take longer than 20 days.
        (None, (0.8, 2.0), 20.0, 0.95),
        (None, (0.8, 2.0), 8.0, 0.05),
        # 10 days of training take 20 calendar days, so 15 days lie below them: the lower side
        # counts, which has no doubt here.
        (20.0, (1.0, 4.0), 15.0, 1.0),
    ],
)
def test_a_deadline_uses_the_side_of_the_interval_on_which_it_lies(
    effective_days: float | None, step_s: tuple[float, float], max_days: float, chance: float
) -> None:
    """10 days at 1 s a step. No failures are lost here (`goodput` is None), so a length without
    doubt of 10 days ends in 15.
    """
    estimate = Estimate(
        feasible=True,
        time=TimeEstimate(step_s=1.0, parts_s={"compute": 1.0}),
        intervals=Intervals(
            confidence=0.9, step_s=step_s, memory_total_bytes=(0.0, 0.0), source="by hand"
        ),
        days=10.0,
        effective_days=effective_days,
    )
    assert deadline_probability(estimate, max_days=max_days) == pytest.approx(
        chance, abs=0.5 / NUM_QUADRATURE_NODES
    )
