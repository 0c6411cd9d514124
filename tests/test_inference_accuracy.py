"""The limits on serving accuracy, against measured runs."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.accuracy.data import folder_named
from benchmarks.accuracy.groups import figures
from benchmarks.accuracy.inference import (
    compare_unseen,
    comparisons,
    limit_predicted,
    regret,
    series,
    shipped_pairs,
)
from benchmarks.accuracy.serving_runs import (
    Predicted,
    ServingRun,
    cached_series,
    dense_runs,
    log_ratios,
)


@pytest.fixture(scope="module")
def runs() -> list[ServingRun]:
    return dense_runs(folder_named())


@pytest.fixture(scope="module")
def pairs(runs: list[ServingRun]) -> list[Predicted]:
    return shipped_pairs(runs)


def test_groups_no_constant_saw(runs: list[ServingRun]) -> None:
    pairs = compare_unseen(runs)
    found = {what: figures(comparisons(pairs, what)) for what in ("ttft", "tpot", "throughput")}
    assert len(pairs) > 350
    assert found["tpot"]["mean_error"] <= 0.06 and found["throughput"]["mean_error"] <= 0.06
    assert found["ttft"]["median_error"] <= 0.20
    free = [pair for pair in pairs if not pair.really_limited]
    assert np.nanmean(np.abs(log_ratios(free, "ttft"))) <= 0.25
    assert limit_predicted(pairs) >= 0.90
    assert all(0.86 <= each["coverage"] <= 0.95 for each in found.values())


def test_offline_throughput_of_groups_no_constant_saw(runs: list[ServingRun]) -> None:
    offline = [pair for pair in compare_unseen(runs) if series(pair.run).startswith("trtllm 0.17")]
    found = figures(comparisons(offline, "throughput"))
    assert found["rows"] > 80 and found["mean_error"] <= 0.08


def test_the_best_tensor_parallel_size_is_found_and_no_real_run_refused(
    runs: list[ServingRun], pairs: list[Predicted]
) -> None:
    cached = cached_series(runs)
    found = regret([pair for pair in pairs if pair.run.series not in cached])
    assert found["groups"] > 150 and found["best_chosen"] >= 0.95 * found["groups"]
    assert found["mean"] <= 0.005 and found["worst"] <= 0.20
    assert all(pair.fits for pair in pairs)


def test_series_that_must_have_cached_their_prompts_are_told_apart(
    runs: list[ServingRun], pairs: list[Predicted]
) -> None:
    """They are predicted as if computed, so the prediction must be slower than the run, and they
    are in no fit.
    """
    cached = cached_series(runs)
    assert cached
    for name in cached:
        members = [pair for pair in pairs if pair.run.series == name]
        assert log_ratios(members, "throughput").mean() < -0.3, name
    assert not {pair.run.series for pair in compare_unseen(runs)} & cached
