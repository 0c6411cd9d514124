"""Factors of single parts, where traces measured them."""

from __future__ import annotations

import numpy as np
import pytest

from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration import Evidence, fit_calibration
from hp_tool.loop.calibration.calibration import Calibration
from hp_tool.loop.calibration.parts import apply_trace_factors, part_factors, part_logs

PREDICTED = {
    "compute": 2.0,
    "attention": 0.5,
    "tensor_parallel": 0.5,
    "data_parallel": 1.0,
    "pipeline_bubble": 0.2,
    "overhead": 0.1,
}


def runs(measured: list[dict[str, float]], *, step_s: float | None = None) -> Evidence:
    """Runs of one configuration whose traces measured some parts."""
    rows = len(measured)
    names = sorted({name for parts in measured for name in parts})
    total = sum(PREDICTED.values()) if step_s is None else step_s
    return Evidence(
        measurement_ids=tuple(map(str, range(rows))),
        parts_s={name: np.full(rows, seconds) for name, seconds in PREDICTED.items()},
        layer_passes=np.ones(rows),
        memory_bytes=np.ones(rows),
        capacity_bytes=np.full(rows, 2.0),
        measured_step_s=np.full(rows, total),
        measured_memory_bytes=np.full(rows, np.nan),
        out_of_memory=np.zeros(rows, dtype=bool),
        measured_parts_s={
            name: np.array([parts.get(name, np.nan) for parts in measured]) for name in names
        },
    )


def test_without_a_trace_nothing_changes_to_the_bit() -> None:
    plain = fit_calibration(evidence=runs([{}]))
    assert part_factors(plain.step_time.part_logs) == {} and "part_factors" not in plain.summary()
    assert "part_logs" not in plain.to_dict()["step_time"]
    parts = {name: np.array([seconds]) for name, seconds in PREDICTED.items()}
    assert apply_trace_factors(parts, plain.step_time.part_logs) is parts


def test_a_part_that_took_twice_as_long_gets_nearly_that_factor_and_no_other_part_changes() -> None:
    factors = part_factors(part_logs(runs([{"data_parallel": 2.0, "compute": 2.1}])))
    assert 1.8 < factors.pop("data_parallel") < 2.0
    assert set(factors.values()) == {1.0}  # 5% more compute is within the scatter.


def test_the_bubble_follows_the_compute() -> None:
    factors = part_factors(part_logs(runs([{"compute": 4.0, "overhead": 9.0}])))
    assert 1.8 < factors["compute"] == factors["pipeline_bubble"] < 2.0
    assert factors["overhead"] == 1.0


def test_the_factor_by_hand() -> None:
    """ln f = r (1 - s^2 / (n r^2)) with r = ln 2."""
    ratio, scatter = np.log(2.0), assumed().traces.part_scatter_log_sd
    for count in (1, 4):
        factors = part_factors(part_logs(runs([{"attention": 1.0}] * count)))
        by_hand = ratio * (1.0 - scatter**2 / count / ratio**2)
        assert np.log(factors["attention"]) == pytest.approx(by_hand)


def test_small_parts_and_overheads_teach_nothing() -> None:
    assert part_logs(runs([{"overhead": 3.0, "pipeline_bubble": 2.0, "optimizer": 1.0}])).size == 0
    small = runs([{"tensor_parallel": 1.0}])
    small.parts_s["tensor_parallel"][:] = 0.005
    assert part_logs(small).size == 0


def test_predictions_take_each_part_with_its_factor_and_a_stored_fit_answers_alike() -> None:
    slow = PREDICTED | {"data_parallel": 2.0}
    calibration = fit_calibration(evidence=runs([slow], step_s=sum(slow.values())))
    other = {
        name: np.array([0.1, 5.0]) if name == "data_parallel" else np.full(2, seconds)
        for name, seconds in PREDICTED.items()
    }
    read = Calibration.from_dict(calibration.to_dict())
    medians = [
        fit.step_time.predict(parts_s=other, layer_passes=np.ones(2)).median_s
        for fit in (calibration, read)
    ]
    assert medians[0].tolist() == medians[1].tolist()
    step_alone = fit_calibration(evidence=runs([{}], step_s=sum(slow.values()))).step_time
    alone = step_alone.predict(parts_s=other, layer_passes=np.ones(2)).median_s
    truth = np.array(
        [sum(PREDICTED.values()) - 1.0 + 2.0 * 0.1, sum(PREDICTED.values()) - 1.0 + 2.0 * 5.0]
    )
    assert np.all(np.abs(np.log(medians[0] / truth)) < 0.5 * np.abs(np.log(alone / truth)))
    parts = calibration.step_time.calibrated_parts(parts_s=other, layer_passes=np.ones(2))
    assert parts["data_parallel"] / other["data_parallel"] == pytest.approx(
        parts["tensor_parallel"] / other["tensor_parallel"] * 1.94, rel=0.03
    )
    assert calibration.summary()["part_factors"]["data_parallel"] == pytest.approx(1.94, rel=0.03)


def test_runs_with_and_without_a_trace_stand_together() -> None:
    both = Evidence.concatenate([runs([{}]), runs([{"attention": 1.0}])])
    assert np.isnan(both.measured_parts_s["attention"]).tolist() == [True, False]
    assert part_factors(part_logs(both)) == part_factors(part_logs(runs([{"attention": 1.0}])))
