"""A step's parts from a trace as a measurement: what they teach, and that it can be undone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hp_tool.cost.candidates import Candidates
from hp_tool.errors import InputError
from hp_tool.loop import learning
from hp_tool.loop.learning import StoredCalibrations, add_report
from hp_tool.loop.learning.evidence import residual_report
from hp_tool.loop.learning.links import fitted_links
from hp_tool.questions import schema
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.links import Links, with_links
from hp_tool.store import open_store

QUERY = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 32},
    "training": {
        "sequence_length": 4096,
        "global_batch_size": 64,
        "overlap": {"data_parallel": False},
    },
}
LAYOUT, OTHER = (
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
)
HALF = Links(network=0.5)


def resolved(parallel: dict[str, int]):
    return resolve_configuration(schema.parse_query(QUERY | {"parallel": parallel}))


def parts_of(parallel: dict[str, int], links: Links = HALF) -> dict[str, float]:
    """Seconds by part on such links."""
    one = resolved(parallel)
    return {
        name: float(s)
        for name, s in with_links(one.problem, links).costs(one.candidate).parts.items()
    }


def report(step: dict[str, float], **changes: object) -> bytes:
    measurement = {"step_s": sum(step.values()), "parts_s": step} | changes
    return json.dumps({"query": QUERY, "parallel": LAYOUT, "measurement": measurement}).encode()


def test_a_network_of_half_the_bandwidth_is_found_in_the_parts_of_one_step() -> None:
    one = resolved(LAYOUT)
    measured = {name: np.array([seconds]) for name, seconds in parts_of(LAYOUT).items()}
    candidates = Candidates.from_configs([one.config])
    assert fitted_links([(one.problem, candidates, measured)]).network == pytest.approx(
        0.5, rel=0.1
    )
    assert (
        fitted_links([])
        == fitted_links([(one.problem, candidates, {"compute": np.array([np.nan])})])
        == Links()
    )
    stated = {name: np.array([seconds]) for name, seconds in parts_of(LAYOUT, Links()).items()}
    near = fitted_links([(one.problem, candidates, stated)])
    assert near.network == pytest.approx(1.0, abs=0.02) and near.nvlink == pytest.approx(
        1.0, abs=0.02
    )


def test_one_traced_step_corrects_another_layout_and_excluding_it_undoes_that(
    tmp_path: Path,
) -> None:
    store = open_store(f"sqlite:///{tmp_path}/store.sqlite3")
    with_trace = add_report(report(parts_of(LAYOUT)), store=store, source="file", key=None)
    assert with_trace.state == "accepted" and with_trace.measurement.parts_s == parts_of(LAYOUT)
    learning.calibrate(store=store)
    truth = sum(parts_of(OTHER).values())
    estimate = resolved(OTHER).calibrated_estimate(StoredCalibrations(store=store))
    plain = resolved(OTHER).estimate().time.step_s
    assert abs(estimate.time.step_s / truth - 1.0) < 0.3 * abs(plain / truth - 1.0)
    assert estimate.provenance["calibration"]["links"]["network"] == pytest.approx(0.5, rel=0.1)
    assert estimate.provenance["calibration"]["part_factors"].keys() == estimate.time.parts_s.keys()
    (residual,) = residual_report(store=store, record=store.list_calibrations(limit=1).items[0])
    assert residual.before_s == pytest.approx(resolved(LAYOUT).estimate().time.step_s)

    store.set_measurement_state(measurement_id=with_trace.id, state="excluded")
    learning.refit(store=store)
    undone = resolved(OTHER).calibrated_estimate(StoredCalibrations(store=store))
    assert undone is None or undone.time.step_s == pytest.approx(plain)


def test_the_same_step_without_its_parts_tells_less(tmp_path: Path) -> None:
    known, truth = parts_of(LAYOUT), sum(parts_of(OTHER).values())
    errors = []
    for parts in (known, None):
        store = open_store(f"sqlite:///{tmp_path}/{parts is None}.sqlite3")
        add_report(report(known, parts_s=parts), store=store, source="file", key=None)
        learning.calibrate(store=store)
        estimate = resolved(OTHER).calibrated_estimate(StoredCalibrations(store=store))
        errors.append(abs(np.log(estimate.time.step_s / truth)))
    assert errors[0] < 0.5 * errors[1]


def test_parts_that_are_none_or_do_not_sum_to_the_step_are_refused(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/store.sqlite3")
    for changes, message in [
        ({"parts_s": {"matmuls": 1.0}}, "matmuls is not a part of a step"),
        ({"parts_s": {"compute": 1e-3}}, "Report both for the same step"),
    ]:
        with pytest.raises(InputError, match=message):
            add_report(report(parts_of(LAYOUT), **changes), store=store, source="file", key=None)


def test_links_as_stated_change_nothing() -> None:
    problem = resolved(LAYOUT).problem
    assert with_links(problem, Links()) is problem
    faster = with_links(problem, Links(network=2.0, nvlink=3.0))
    assert (
        faster.cluster.inter_node_bandwidth_bytes_per_second
        == 2.0 * problem.cluster.inter_node_bandwidth_bytes_per_second
    )
    assert faster.profile.gpu.nvlink == replace(
        problem.profile.gpu.nvlink,
        bandwidth_fraction=3.0 * problem.profile.gpu.nvlink.bandwidth_fraction,
    )
