"""The door: good queries come in whole, bad ones are told which field, what was wrong and what
would fix it.
"""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_tool.domain.parallel import Recompute
from hp_tool.domain.query import Query
from hp_tool.errors import HpToolError, InputError
from hp_tool.questions import answers, schema, training

QUERY: dict[str, Any] = {
    "id": "row-17",
    "kind": "training",
    "model": {
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "vocab_size": 8192,
        "gated_mlp": False,
    },
    "cluster": {
        "gpu": "a100-sxm-80gb",
        "num_gpus": 16,
        "gpus_per_node": 8,
        "inter_node_bandwidth_bytes_per_second": 25e9,
    },
    "training": {
        "sequence_length": 1024,
        "global_batch_size": 64,
        "precision": "bf16",
        "total_tokens": 300e9,
        "dropout": 0.1,
    },
    "parallel": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "micro_batch_size": 1,
        "sequence_parallel": True,
        "recompute": {"granularity": "full", "method": "block", "num_layers": 1},
        "zero_stage": 1,
    },
    "constraints": {"max_days": 30, "memory_headroom_fraction": 0.05},
    "search": {"budget_runs": 4, "run_timeout_s": 100.0, "seed": 0},
    "objective": "throughput",
}

SERVING: dict[str, Any] = {
    "kind": "inference",
    "model": "qwen3-32b",
    "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
    "inference": {
        "input_length": 4000,
        "output_length": 1000,
        "concurrency": 64,
        "precision": "fp8",
        "kv_cache_precision": "bf16",
        "engine": "vllm",
        "engine_version": "0.10.0",
    },
    "parallel": {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 1,
        "attention_data_parallel_size": 1,
    },
    "targets": {"ttft_s": 1.0, "tpot_s": 0.03},
}


def changed(path: str, value: object) -> dict[str, Any]:
    """QUERY with the value at a dotted path replaced."""
    query = copy.deepcopy(QUERY)
    *parents, last = path.split(".")
    node = query
    for name in parents:
        node = node[name]
    node[last] = value
    return query


def refused(data: Any, **expected: object) -> InputError:
    """The error of a query that must not come in."""
    with pytest.raises(InputError) as caught:
        schema.parse_query(data)
    for name, value in expected.items():
        assert getattr(caught.value, name) == value
    return caught.value


def test_mapping_json_and_yaml_mean_the_same() -> None:
    query = schema.parse_query(QUERY)
    assert (
        query
        == schema.parse_query(json.dumps(QUERY))
        == schema.parse_query(json.dumps(QUERY).encode())
    )
    assert query == schema.parse_query(
        """
        id: row-17
        kind: training
        model: {num_hidden_layers: 4, hidden_size: 512, num_attention_heads: 8, vocab_size: 8192, gated_mlp: false}
        cluster: {gpu: a100-sxm-80gb, num_gpus: 16, gpus_per_node: 8, inter_node_bandwidth_bytes_per_second: 25e9}
        training: {sequence_length: 1024, global_batch_size: 64, precision: bf16, total_tokens: 300.0e9, dropout: 0.1}
        parallel:
          tensor_parallel_size: 2
          pipeline_parallel_size: 2
          micro_batch_size: 1
          sequence_parallel: true
          recompute: {granularity: full, method: block, num_layers: 1}
          zero_stage: 1
        constraints: {max_days: 30, memory_headroom_fraction: 0.05}
        search: {budget_runs: 4, run_timeout_s: 100.0, seed: 0}
        objective: throughput
        """  # noqa: E501
    )
    assert query.training is not None and query.training.total_tokens == 300e9
    assert query.parallel.recompute == Recompute(granularity="full", method="block", num_layers=1)


def test_a_parsed_query_can_be_written_and_read_again() -> None:
    query = schema.parse_query(QUERY)
    assert (
        schema.parse_query(schema.to_dict(query))
        == query
        == schema.parse_query(schema.to_json(query))
    )


@pytest.mark.parametrize(
    ("path", "field", "hint"),
    [
        ("sequense_length", "sequense_length", "known keys"),
        ("training.sequence_lenght", "training.sequence_lenght", "did you mean sequence_length?"),
        ("cluster.gpu_per_node", "cluster.gpu_per_node", "did you mean gpus_per_node?"),
        (
            "parallel.tensor_model_parallel_size",
            "parallel.tensor_model_parallel_size",
            "did you mean tensor_parallel_size?",
        ),
        (
            "parallel.recompute.granularty",
            "parallel.recompute.granularty",
            "did you mean granularity?",
        ),
        ("search.budget", "search.budget", "did you mean budget_runs?"),
        ("paralel", "paralel", "did you mean parallel?"),
        ("Model", "Model", "did you mean model?"),
        ("training.Precision", "training.Precision", "did you mean precision?"),
        ("int", "int", "did you mean kind?"),
    ],
)
def test_an_unknown_key_names_its_nearest(path: str, field: str, hint: str) -> None:
    error = refused(changed(path, 1), code="unknown_key", field=field)
    assert hint in error.message


def test_an_unknown_key_of_an_inline_model_names_its_nearest() -> None:
    with pytest.raises(InputError, match="hidden_size") as caught:
        training.estimate(query=schema.parse_query(changed("model.hiden_size", 512)))
    assert caught.value.field == "model.hiden_size"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("training.sequence_length", "1024", "expected a valid integer"),
        ("training.sequence_length", True, "expected a valid integer"),
        ("training.sequence_length", 1024.5, "integer"),
        ("training.global_batch_size", 0, "from 1 to"),
        ("training.global_batch_size", 1 << 80, "from 1 to"),
        ("training.dropout", 1.0, "from 0 to 0.99"),
        ("training.precision", "bf17", "'bf16'"),
        ("training.total_tokens", math.inf, "finite number"),
        ("constraints.memory_headroom_fraction", -0.1, "from 0 to 0.99"),
        ("parallel.micro_batch_size", [], "empty list"),
        ("parallel.tensor_parallel_size", [1, 0], "from 1 to"),
        ("parallel.zero_stage", 4, "from 0 to 3"),
        ("parallel.sequence_parallel", "yes", "boolean"),
        ("parallel.recompute", "everything", "'selective'"),
        ("search.launcher", "lsf", "'slurm'"),
        ("search.steps", -1, "from 1 to"),
        ("kind", "pretraining", "'training' or 'inference'"),
    ],
)
def test_a_wrong_value_names_field_and_expectation(path: str, value: object, message: str) -> None:
    error = refused(changed(path, value))
    assert message in error.message
    assert error.field == path


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize(
    "path",
    ["training.total_tokens", "training.dropout", "search.run_timeout_s", "constraints.max_days"],
)
def test_numbers_that_are_none_are_refused_in_json_too(path: str, number: str) -> None:
    refused(
        json.dumps(changed(path, "NUMBER")).replace('"NUMBER"', number),
        field=path,
        code="invalid_value",
    )


@pytest.mark.parametrize("missing", ["kind", "model", "cluster", "training"])
def test_a_missing_section_is_named(missing: str) -> None:
    error = refused(
        {key: value for key, value in QUERY.items() if key != missing},
        field=missing,
        code="missing_field",
    )
    assert missing in error.message


def test_a_missing_field_is_named() -> None:
    query = copy.deepcopy(QUERY)
    del query["training"]["global_batch_size"]
    refused(query, field="training.global_batch_size", code="missing_field")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "just words",
        "kind: [training",
        "kind: training\nkind2: !!python/object/apply:os.getcwd []",
        "kind: &a training\nmodel: *a",
        "\x00",
        b"\xff\xfe\x00",
        "{" * 100_000,
        "[" * 100_000,
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        "- " * 50_000,
        '{"kind": 1' + "0" * 10_000 + "}",
        "kind: 2026-13-45",
    ],
)
def test_what_is_no_query_is_refused_in_one_sentence(text: str | bytes) -> None:
    assert refused(text).message


def test_a_large_input_is_refused_unread() -> None:
    refused(b'{"kind": "' + b"x" * 10_000_000 + b'"}', code="too_large")


def test_a_query_of_the_other_kind_is_told_so() -> None:
    refused(changed("kind", "inference"), field="inference", code="missing_field")
    refused(SERVING | {"kind": "training"}, field="training", code="missing_field")


def paths(data: dict[str, Any], *parents: str) -> list[str]:
    found = []
    for key, value in data.items():
        found.append(".".join((*parents, key)))
        if isinstance(value, dict):
            found += paths(value, *parents, key)
    return found


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1, 2, 3, 7, 1 << 31, 1 << 63, 10**40, 1e-320, 1e308]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["none", "full", "gpt-22b", "h100-sxm-80gb", "cpu", "/", "../x", "x.json", "a" * 400]
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)


def mutations(query: dict[str, Any]) -> st.SearchStrategy[list[tuple[str, Any]]]:
    """Up to three keys of the query, each with a value it may not expect."""
    return st.lists(st.tuples(st.sampled_from(paths(query)), VALUES), min_size=1, max_size=3)


def mutated(query: dict[str, Any], changes: list[tuple[str, Any]]) -> dict[str, Any]:
    query = copy.deepcopy(query)
    for path, value in changes:
        *parents, last = path.split(".")
        node: Any = query
        for name in parents:
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[last] = value
    return query


def answered(
    data: dict[str, Any], *, as_text: bool
) -> tuple[answers.EstimateAnswer, answers.RecommendAnswer] | None:
    """Both answers to a query, or None where it was refused with an error of ours; nothing else may
    come out.
    """
    try:
        query = schema.parse_query(json.dumps(data) if as_text else data)
        found = answers.answer_estimate(query), answers.answer_recommend(query, top=2)
    except HpToolError as error:
        assert error.message and json.dumps(error.as_dict())
        return None
    estimate, ranked = found
    assert estimate.estimate.feasible != bool(estimate.estimate.reasons)
    assert all(row.estimate.feasible for row in ranked.recommendations)
    for answer in found:
        assert "NaN" not in schema.to_json(answer) and "Infinity" not in schema.to_json(answer)
    return found


@pytest.mark.filterwarnings("error")
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(changes=mutations(QUERY), as_text=st.booleans())
def test_any_training_query_is_answered_or_refused(
    changes: list[tuple[str, Any]], as_text: bool
) -> None:
    found = answered(mutated(QUERY, changes), as_text=as_text)
    if found is not None and (time := found[0].estimate.time) is not None:
        assert 0.0 < time.step_s < math.inf
        assert math.isclose(sum(time.parts_s.values()), time.step_s, rel_tol=1e-9)


@pytest.mark.filterwarnings("error")
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(changes=mutations(SERVING), as_text=st.booleans())
def test_any_serving_query_is_answered_or_refused(
    changes: list[tuple[str, Any]], as_text: bool
) -> None:
    answered(mutated(SERVING, changes), as_text=as_text)


@given(text=st.text(max_size=200) | st.binary(max_size=200))
def test_any_text_is_a_query_or_refused(text: str | bytes) -> None:
    try:
        assert isinstance(schema.parse_query(text), Query)
    except HpToolError as error:
        assert error.message
