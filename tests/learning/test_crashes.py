"""What was seen to crash is not recommended, and the answer says so."""

from __future__ import annotations

import pytest

from tests.learning import machine
from tests.learning.machine import CONFIGURATIONS

QUERY = machine.QUERY | {
    "training": machine.QUERY["training"] | {"cross_entropy": "fused", "cuda_graphs": False}
}
"""Leaves no knob open that a ranking would take: its rows differ in `parallel` alone."""


def report(parallel):
    return machine.report(parallel, query=QUERY)


@pytest.fixture
def asked(http):
    """A cluster that was measured, and what is asked about it, after a fit of what is known by
    then.
    """
    for parallel in CONFIGURATIONS[:3]:
        assert http.post("/v1/measurements", json=report(parallel)).status_code == 201

    def answer(top=3, **query):
        assert http.post("/v1/calibrations").status_code == 201
        answer = http.post("/v1/recommendations", json=QUERY | query, params={"top": top}).json()
        return [row["parallel"] for row in answer["recommendations"]], answer["rejections"].get(
            "crashed", 0
        )

    return answer


def crash(http, parallel, query=QUERY):
    body = {"query": query, "parallel": parallel, "measurement": {"status": "crashed"}}
    answer = http.post("/v1/measurements", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def test_what_crashed_twice_is_not_recommended_until_a_run_of_it_succeeds(http, asked):
    (best, *_), crashed = asked()
    assert crashed == 0
    one = crash(http, best)
    assert asked()[0][0] == best  # one may be the node's
    crash(http, best)
    rows, crashed = asked()
    assert crashed == 1 and best not in rows and rows
    assert asked(top=1)[0] and asked(top=1)[0] != [best]
    estimate = http.post("/v1/estimates", json=QUERY | {"parallel": best}).json()
    (reason,) = estimate["calibrated_estimate"]["reasons"]
    assert (reason["code"], estimate["calibrated_estimate"]["feasible"]) == ("crashed", False)
    assert reason["message"].startswith("2 runs") and estimate["estimate"]["feasible"]
    shorter = QUERY["training"] | {"sequence_length": 2048}
    assert asked(training=shorter)[1] == 0  # another problem

    assert http.patch(f"/v1/measurements/{one}", json={"state": "excluded"}).status_code == 200
    assert asked()[0][0] == best
    http.patch(f"/v1/measurements/{one}", json={"state": "accepted"})
    assert best not in asked()[0]
    assert http.post("/v1/measurements", json=report(best)).status_code == 201
    assert asked(top=50)[1] == 0
    estimate = http.post("/v1/estimates", json=QUERY | {"parallel": best}).json()
    assert estimate["calibrated_estimate"]["feasible"]


def test_where_all_that_is_asked_for_crashed_it_is_a_miss_with_its_reason(http, asked):
    query = QUERY | {"training": QUERY["training"] | {"offload": "none"}}
    ((only,), _) = asked(top=1, **query)
    fixed = {name: value for name, value in only.items() if value is not None}
    for _ in range(2):
        crash(http, only, query=query)
    assert asked(**query | {"parallel": fixed}) == ([], 1)
    (miss,) = http.post("/v1/recommendations", json=query | {"parallel": fixed}).json()[
        "nearest_misses"
    ]
    assert [reason["code"] for reason in miss["calibrated_estimate"]["reasons"]] == ["crashed"]
