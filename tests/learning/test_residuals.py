"""What is called an outlier."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.learning.evidence import outliers

RATIOS = st.lists(st.floats(0.5, 2.0), min_size=3, max_size=30)


def test_one_run_apart_is_found_whatever_the_others_share() -> None:
    for bias in (0.5, 1.0, 1.7):
        assert outliers(bias * np.array([1.0, 1.04, 0.97, 1.02, 4.0])).tolist() == [False] * 4 + [True]


def test_close_agreement_has_no_outliers() -> None:
    assert not outliers(np.array([1.0, 1.0, 1.0, 1.0, 1.05])).any()
    assert outliers(np.zeros(0)).tolist() == []


@given(RATIOS, st.floats(0.1, 10.0))
def test_a_common_factor_and_the_direction_do_not_matter(ratios: list[float], factor: float) -> None:
    found = outliers(np.array(ratios))
    spread = np.log(np.array(ratios))
    score = np.abs(spread - np.median(spread))
    assert found.sum() <= len(ratios) / 2
    if found.any():
        assert score[found].min() > score[~found].max()
    again = outliers(factor * np.array(ratios))
    near = np.isclose(0.6745 * score, 3.5 * max(float(np.median(score)), 0.02), rtol=1e-6)
    assert (found == again)[~near].all()
