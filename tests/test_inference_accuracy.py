"""The limits on serving accuracy, against measured runs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.accuracy import inference
from benchmarks.accuracy.data import folder_named


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return inference.evaluate(folder_named(), refits=False)


def test_groups_no_constant_saw(report: dict[str, Any]) -> None:
    unseen = report["unseen"]["all"]
    assert unseen["runs"] > 350
    assert unseen["tpot_error"] <= 0.06 and unseen["throughput_error"] <= 0.06
    assert unseen["ttft_median_error"] <= 0.20 and unseen["ttft_abs_log"] <= 0.25
    assert unseen["kv_limit_right"] >= 0.90
    assert all(0.86 <= unseen[f"{what}_inside"] <= 0.95 for what in ("ttft", "tpot", "throughput"))


def test_offline_throughput_of_groups_no_constant_saw(report: dict[str, Any]) -> None:
    offline = [row for name, row in report["unseen"].items() if name.startswith("trtllm 0.17")]
    runs = sum(row["runs"] for row in offline)
    assert (
        runs > 80 and sum(row["throughput_error"] * row["runs"] for row in offline) / runs <= 0.08
    )


def test_the_best_tensor_parallel_size_is_found_and_no_real_run_refused(
    report: dict[str, Any],
) -> None:
    regret = report["regret"]["all"]
    assert regret["groups"] > 150 and regret["best_chosen"] >= 0.95 * regret["groups"]
    assert regret["mean"] <= 0.005 and regret["worst"] <= 0.20
    assert report["refused"] == 0


def test_series_that_must_have_cached_their_prompts_are_told_apart(report: dict[str, Any]) -> None:
    """They are predicted as if computed, so the prediction must be slower than the run, and they
    are in no fit.
    """
    for name, figures in report["cached"].items():
        assert figures["throughput_bias"] < -0.3, name
        assert name == "all" or name not in report["seen"]
