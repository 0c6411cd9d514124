"""What a search gets to see of a large space, and which measurements it may learn from."""

from __future__ import annotations

import numpy as np
import pytest

from hp_tool.domain.measurement import Fidelity, Hardware, Measurement
from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.records import REUSED
from hp_tool.errors import UnsupportedError
from hp_tool.loop.learning.evidence import stored_evidence
from hp_tool.loop.learning.series import cluster_key
from hp_tool.loop.tuning import problem as module
from hp_tool.loop.tuning.evidence import reusable_measurements
from hp_tool.loop.tuning.problem import build_problem
from hp_tool.loop.tuning.training_result import simplest_first
from hp_tool.questions import schema
from hp_tool.questions.training import recommend
from hp_tool.store import open_store

LARGE = {
    "kind": "training",
    "model": "gpt3-175b",
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 1024, "gpus_per_node": 8},
    "training": {"sequence_length": 2048, "global_batch_size": 1536},
    "parallel": {"sequence_parallel": [True, False]},
}
HARDWARE = Hardware(gpu="a100-sxm-80gb", num_gpus=1024)


def build():
    return build_problem(query=schema.parse_query(LARGE), query_json=LARGE, hardware=HARDWARE)


def kinds(candidates):
    columns = (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "sequence_parallel",
        "recompute_method",
    )
    return set(zip(*(getattr(candidates, name).tolist() for name in columns), strict=True))


def test_a_large_space_is_represented_by_its_fastest_and_the_best_of_each_kind(monkeypatch):
    whole = build()
    monkeypatch.setattr(module, "MAX_ROWS", 50)
    small = build()
    assert len(small.search.table) < 0.2 * len(whole.search.table)
    assert kinds(small.search.candidates) == kinds(whole.search.candidates)

    def step_s(problem):
        return np.sum(list(problem.search.table.parts_s.values()), axis=0)

    fastest = np.sort(step_s(whole))[:50]
    np.testing.assert_allclose(np.sort(step_s(small))[:50], fastest)


def test_the_fewest_devices_are_searched_as_far_as_is_known():
    """Enough by the cost model alone, or by what is known of the cluster."""
    query = schema.parse_query(LARGE | {"objective": "min_gpus"})
    found = build_problem(query=query, query_json=LARGE, hardware=HARDWARE)
    fewest = recommend(query=query, top=1).recommendations[0].parallel
    devices = (
        fewest.tensor_parallel_size * fewest.pipeline_parallel_size * fewest.data_parallel_size
    )
    assert found.search.cluster.num_gpus == devices < query.cluster.num_gpus


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "t5-11b"}, "model.architecture"),
        ({"parallel": {"rank_order": "tp-pp-dp"}}, "parallel.rank_order"),
        (
            {"trainer": {"command": ["train"], "reader": "json"}, "search": {"breakdown": True}},
            "search.breakdown",
        ),
        (
            {"training": {"sequence_length": 2048, "global_batch_size": 1536, "optimizer": "muon"}},
            "training.optimizer",
        ),
    ],
)
def test_what_no_run_can_measure_is_refused_before_the_first(change, field):
    query = schema.parse_query(LARGE | change)
    with pytest.raises(UnsupportedError) as caught:
        build_problem(query=query, query_json=LARGE, hardware=HARDWARE)
    assert caught.value.field == field


def test_candidates_that_no_run_can_measure_are_turned_away_and_counted():
    query = schema.parse_query(
        LARGE | {"parallel": {"context_parallel_size": [1, 2], "zero_stage": [1, 3]}}
    )
    found = build_problem(query=query, query_json=LARGE, hardware=HARDWARE)
    assert set(found.search.candidates.context_parallel_size.tolist()) == {1, 2}
    assert set(found.search.candidates.zero_stage.tolist()) == {1}
    assert found.space.rejections["not_profiled"] > len(found.space.candidates)


def test_rows_are_found_by_configuration_and_named_by_their_axes():
    problem = build().search
    for row in (0, len(problem.table) // 2, len(problem.table) - 1):
        config = problem.candidates.config(row)
        assert problem.row(config) == row
        assert problem.params(config)["tensor_parallel_size"] == config.tensor_parallel_size
        assert problem.table.row_of(problem.params(config)) == row


def test_cpu_measurements_belong_to_their_host_and_gpu_ones_to_their_kind():
    cluster = build().training.cluster
    assert cluster_key(cluster, HARDWARE) == cluster_key(
        cluster, Hardware(gpu="a100-sxm-80gb", num_gpus=8, hosts=("b",))
    )
    cpu = build_problem(
        query=schema.parse_query(
            {
                "kind": "training",
                "model": {
                    "num_hidden_layers": 2,
                    "hidden_size": 64,
                    "num_attention_heads": 4,
                    "vocab_size": 128,
                },
                "cluster": {"gpu": "cpu", "num_gpus": 2},
                "training": {"sequence_length": 64, "global_batch_size": 4},
            }
        ),
        query_json={},
        hardware=Hardware(gpu="cpu", num_gpus=2, hosts=("a",)),
    ).training.cluster
    keys = {cluster_key(cpu, Hardware(gpu="cpu", hosts=(host,))) for host in ("a", "b")}
    assert len(keys) == 2


@pytest.fixture
def store(tmp_path):
    opened = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    yield opened
    opened.close()


def add(store, problem, *, row=0, query=LARGE, **changes):
    values = {
        "source": "profile",
        "cluster_key": problem.cluster_key,
        "gpu": "a100-sxm-80gb",
        "framework": "megatron-core",
        "model": "gpt3-175b",
        "query": query,
        "parallel": problem.candidates.config(row),
        "measurement": Measurement(status="ok", step_s=20.0, peak_memory_bytes=2**35),
        "problem_digest": problem.problem_digest,
        **changes,
    }
    return store.add_measurement(measurement=NewMeasurement(**values)).id


def test_evidence_is_what_stands_for_whole_runs_on_this_cluster(store):
    tuning = build()
    problem = tuning.search
    reduced = Measurement(
        status="ok", step_s=1.0, fidelity=Fidelity(data_parallel_size=2, num_micro_batches=4)
    )
    wanted = [
        add(store, problem),
        add(store, problem, row=3, measurement=Measurement(status="oom")),
        add(store, problem, row=4, source="reported"),
        add(store, problem, row=5, measurement=reduced),
    ]
    add(store, problem, cluster_key="elsewhere")
    add(store, problem, source="reported", state="held")
    add(store, problem, predicted={REUSED: "other"})
    add(store, problem, query={"kind": "training", "model": "a-model-nobody-knows"})
    evidence = stored_evidence(store=store, series=tuning.series, without_search="none")
    assert set(evidence.measurement_ids) == set(wanted)
    assert evidence.out_of_memory.sum() == 1
    assert np.isfinite(evidence.measured_step_s).sum() == 3
    row = evidence.measurement_ids.index(wanted[0])
    predicted = {name: seconds[row] for name, seconds in evidence.parts_s.items()}
    assert sum(predicted.values()) == pytest.approx(
        sum(part[0] for part in problem.table.parts_s.values())
    )


def test_only_whole_profile_runs_of_the_same_problem_are_reused(store):
    problem = build().search
    wanted = add(store, problem)
    add(store, problem, row=1, measurement=Measurement(status="crashed"))
    add(store, problem, row=2, source="reported")
    add(store, problem, row=3, problem_digest="another")
    assert reusable_measurements(store=store, problem=problem) == {problem.digest(0): wanted}


def test_the_first_row_is_the_simplest_of_those_nearly_as_fast():
    """TP 8 alone before TP 8 x PP 2; a prediction does not displace what was measured."""
    small = LARGE | {
        "model": "gpt-22b",
        "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 16},
        "parallel": {},
    }
    problem = build_problem(
        query=schema.parse_query(small),
        query_json=small,
        hardware=Hardware(gpu="a100-sxm-80gb", num_gpus=16),
    )
    candidates = problem.search.candidates
    plain = (candidates.tensor_parallel_size == 8) & (candidates.context_parallel_size == 1)
    (one, *_), (two, *_) = (
        np.flatnonzero(plain & (candidates.pipeline_parallel_size == p)).tolist() for p in (1, 2)
    )
    known_s = np.full(len(candidates), 2.0)
    nothing = np.zeros(len(candidates))

    def first(seconds, measured=()):
        known_s[[two, one]] = seconds
        rows = [two, one]
        return simplest_first(
            rows,
            problem=problem,
            known_s=known_s,
            known_bytes=nothing,
            fails=nothing,
            measured=measured,
        )

    assert first((1.0, 1.005)) == [one, two]
    assert first((1.0, 1.02)) == [two, one]
    assert first((1.0, 1.005), measured=(two,)) == [two, one]
    assert first((1.0, 1.005), measured=(one, two)) == [one, two]
