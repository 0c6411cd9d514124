"""What is called an outlier, and what tells runs apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog import cluster, model
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.loop.calibration.evidence import residual_features
from hp_tool.loop.learning.evidence import mark_outliers
from tests.cost.cases import case_of

RATIOS = st.lists(st.floats(0.5, 2.0), min_size=3, max_size=30)


def test_one_run_apart_is_found_whatever_the_others_share() -> None:
    for bias in (0.5, 1.0, 1.7):
        assert mark_outliers(bias * np.array([1.0, 1.04, 0.97, 1.02, 4.0])).tolist() == [
            False
        ] * 4 + [True]


def test_close_agreement_has_no_outliers() -> None:
    assert not mark_outliers(np.array([1.0, 1.0, 1.0, 1.0, 1.05])).any()
    assert mark_outliers(np.zeros(0)).tolist() == []


@given(RATIOS, st.floats(0.1, 10.0))
def test_a_common_factor_and_the_direction_do_not_matter(
    ratios: list[float], factor: float
) -> None:
    found = mark_outliers(np.array(ratios))
    spread = np.log(np.array(ratios))
    score = np.abs(spread - np.median(spread))
    assert found.sum() <= len(ratios) / 2
    if found.any():
        assert score[found].min() > score[~found].max()
    again = mark_outliers(factor * np.array(ratios))
    near = np.isclose(0.6745 * score, 3.5 * max(float(np.median(score)), 0.02), rtol=1e-6)
    assert (found == again)[~near].all()


def test_a_run_is_told_by_its_dispatcher_whether_it_is_named_or_its_release_s_own() -> None:
    """What runs of a flexible dispatcher leave unexplained says little of others."""
    spec, devices = model("qwen3-30b-a3b"), cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=64))
    workload = TrainingWorkload(sequence_length=4096, global_batch_size=512)
    rows = [
        ParallelConfig(
            data_parallel_size=64, expert_parallel_size=8, moe_token_dispatcher_type=name
        )
        for name in (None, "alltoall", "flex")
    ]
    for usual, told in (("alltoall", [0, 0, 1]), ("flex", [1, 0, 1])):
        case = case_of(model=spec, workload=workload, cluster=devices)
        case = replace(case, strategy=replace(case.strategy, moe_token_dispatcher_type=usual))
        features = residual_features(case=case, candidates=Candidates.from_configs(rows))
        assert features["flex_dispatcher"].tolist() == told
