"""Scaling laws against the tables they come from, and against the loss they minimise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.questions.sizing.laws import LAWS, compute_overhead, over_trained_law, predicted_loss

BUDGETS = st.floats(1e18, 1e28)

APPROACH_1 = [
    (400e6, 1.92e19),
    (1e9, 1.21e20),
    (10e9, 1.23e22),
    (67e9, 5.76e23),
    (175e9, 3.85e24),
    (280e9, 9.90e24),
    (1e12, 1.27e26),
]
APPROACH_2 = [
    (400e6, 1.84e19),
    (1e9, 1.20e20),
    (10e9, 1.32e22),
    (67e9, 6.88e23),
    (175e9, 4.54e24),
    (280e9, 1.18e25),
    (1e12, 1.59e26),
]
APPROACH_3 = [(400e6, 2.21e19), (1e9, 1.62e20), (10e9, 2.46e22), (67e9, 1.71e24), (280e9, 3.52e25)]
"""(parameters, FLOPs) of arXiv 2203.15556, tables 3 and A3; the 175B row of approach 3 is
misprinted there.
"""
ROUNDED = 0.08
"""Exponents are printed with two digits: half of the last one over the tables' range."""
ROWS = [("chinchilla-1", *row) for row in APPROACH_1]
ROWS += [("chinchilla-2", *row) for row in APPROACH_2]
ROWS += [("chinchilla-3", *row) for row in APPROACH_3]


def test_rows_of_the_paper(subtests: pytest.Subtests) -> None:
    for law, parameters, flops in ROWS:
        with subtests.test(law=str(law), parameters=str(parameters)):
            assert LAWS[law].parameters(flops) == pytest.approx(parameters, rel=ROUNDED)


def test_kaplan_at_one_petaflop_day() -> None:
    assert LAWS["kaplan"].parameters(8.64e19) == pytest.approx(1.3e9)


def test_the_corrected_fit_agrees_with_20_tokens_a_parameter_at_chinchillas_compute() -> None:
    parameters = LAWS["chinchilla-corrected"].parameters(5.76e23)
    assert 5.76e23 / 6.0 / parameters**2 == pytest.approx(
        20.0, rel=0.15
    )  # arXiv 2404.10102, section 4


@given(
    flops=BUDGETS,
    law=st.sampled_from([*LAWS.values(), over_trained_law(tokens_per_parameter=200.0)]),
)
def test_laws_are_invertible(flops: float, law: object) -> None:
    parameters = law.parameters(flops)  # type: ignore[attr-defined]
    assert law.flops_of_parameters(parameters) == pytest.approx(flops)  # type: ignore[attr-defined]
    assert law.flops_of_tokens(flops / (6.0 * parameters)) == pytest.approx(flops)  # type: ignore[attr-defined]


@given(flops=BUDGETS, factor=st.floats(0.05, 20.0).filter(lambda factor: abs(factor - 1.0) > 0.01))
def test_no_other_size_has_less_loss_than_the_corrected_optimum(
    flops: float, factor: float
) -> None:
    best = LAWS["chinchilla-corrected"].parameters(flops)
    least = predicted_loss(parameters=best, tokens=flops / (6.0 * best))
    other = factor * best
    assert predicted_loss(parameters=other, tokens=flops / (6.0 * other)) > least
    assert compute_overhead(parameters=best, tokens=flops / (6.0 * best)) == pytest.approx(
        0.0, abs=1e-9
    )
    overhead = compute_overhead(parameters=other, tokens=flops / (6.0 * other))
    assert overhead > 0.0
    leaner = flops / (1.0 + overhead)
    size = LAWS["chinchilla-corrected"].parameters(leaner)
    assert predicted_loss(parameters=size, tokens=leaner / (6.0 * size)) == pytest.approx(
        predicted_loss(parameters=other, tokens=flops / (6.0 * other)), rel=1e-9
    )


def test_over_training_keeps_its_ratio() -> None:
    law = over_trained_law(tokens_per_parameter=1875.0)
    flops = 6.0 * 8e9 * 15e12  # Llama 3 8B
    assert law.parameters(flops) == pytest.approx(8e9)
