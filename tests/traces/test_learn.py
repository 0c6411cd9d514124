"""`explain --learn`: a trace corrects predictions only for the training that its query
describes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Ended, hp_tool
from tests.timeline.made import training

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": {
        "num_hidden_layers": 6,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "vocab_size": 32_000,
    },
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 4},
    "training": {"sequence_length": 1024, "global_batch_size": 2},
    "parallel": {"tensor_parallel_size": 2, "micro_batch_size": 1},
}
"""What `made.training` records: its device, four ranks with TP 2, and the FLOPs of its matmuls."""
LARGER_BATCH = {"sequence_length": 1024, "global_batch_size": 4}
Event = dict[str, Any]


def traces(
    folder: Path, *, keep: Callable[[Event], bool] = lambda _: True, **header: Any
) -> list[str]:
    """Write the made training without the events that `keep` leaves out, with these entries of its
    header changed.
    """
    paths = []
    for rank in training():
        document = rank.document() | header
        document["traceEvents"] = [event for event in document["traceEvents"] if keep(event)]
        path = folder / f"rank{rank.rank}.json"
        path.write_text(json.dumps(document))
        paths.append(str(path))
    return paths


def learn(folder: Path, paths: list[str], query: dict[str, Any] = QUERY) -> Ended:
    file = folder / "query.json"
    file.write_text(json.dumps(query))
    return hp_tool(
        "explain",
        *paths,
        "--query",
        str(file),
        "--learn",
        HP_DATABASE_URL=f"sqlite:///{folder / 'hp.db'}",
    )


def estimate_s(folder: Path) -> float:
    """The calibrated step time of the query."""
    database = f"sqlite:///{folder / 'hp.db'}"
    ended = hp_tool("estimate", "-", "--json", stdin=json.dumps(QUERY), HP_DATABASE_URL=database)
    answer = json.loads(ended.stdout)
    return float((answer.get("calibrated_estimate") or answer["estimate"])["time"]["step_s"])


def trains_only_forward(event: Event) -> bool:
    return "bwd" not in event["name"] and "multi_tensor" not in event["name"]


def test_the_trace_of_the_query_s_training_is_learned(tmp_path: Path) -> None:
    before = estimate_s(tmp_path)
    ended = learn(tmp_path, traces(tmp_path))
    assert ended.returncode == 0 and "(accepted)" in ended.stderr
    assert estimate_s(tmp_path) != before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keep": trains_only_forward}, "no backward pass was recorded (inference)"),
        (
            {"keep": lambda event: "multi_tensor" not in event["name"]},
            "no optimizer step was recorded",
        ),
        (
            {"deviceProperties": [{"name": "NVIDIA A100-SXM4-80GB"}]},
            "the trace is of NVIDIA A100-SXM4-80GB, the query of h100",
        ),
        (
            {"deviceProperties": [{"name": "AMD Instinct MI300X"}]},
            "the trace is of AMD Instinct MI300X",
        ),
    ],
)
def test_a_trace_of_another_kind_of_run_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    ended = learn(tmp_path, traces(tmp_path, **changes))
    assert ended.returncode == 2 and reason in ended.stderr
    assert not (tmp_path / "hp.db").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8}, "training": LARGER_BATCH},
            "the trace is of 4 ranks, the query of 8",
        ),
        (
            {"parallel": {"tensor_parallel_size": 4}},
            "the trace has parallel.tensor_parallel_size 2, the query 4",
        ),
        (
            {"model": QUERY["model"] | {"num_hidden_layers": 2}},
            "recorded matmuls are 3.33e+11 FLOPs per rank and step",
        ),
        ({"cluster": {"gpu": "cpu", "num_gpus": 4}}, "the trace is of a GPU, the query of cpu"),
    ],
)
def test_a_trace_of_another_query_is_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    ended = learn(tmp_path, traces(tmp_path), QUERY | change)
    assert ended.returncode == 2 and reason in ended.stderr
    assert not (tmp_path / "hp.db").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keep": lambda event: event["name"] != "aten::mm"}, "record with record_shapes=True"),
        ({"deviceProperties": []}, "the trace does not name its device"),
        ({"deviceProperties": [{"name": "NVIDIA H100-XYZ"}]}, "the trace is of NVIDIA H100-XYZ"),
    ],
)
def test_what_cannot_be_checked_is_stored_and_not_applied(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    before = estimate_s(tmp_path)
    ended = learn(tmp_path, traces(tmp_path, **changes))
    assert ended.returncode == 0 and "(held)" in ended.stderr and reason in ended.stderr
    assert "hp-tool measurements --accept" in ended.stderr
    assert estimate_s(tmp_path) == before


def test_a_smaller_model_s_matmuls_are_held(tmp_path: Path) -> None:
    """Fewer FLOPs than the query's may be matmuls in kernels whose shapes torch does not record."""
    query = QUERY | {"model": QUERY["model"] | {"num_hidden_layers": 24}}
    ended = learn(tmp_path, traces(tmp_path), query)
    assert (
        ended.returncode == 0
        and "(held)" in ended.stderr
        and "another model or batch" in ended.stderr
    )


def test_the_answer_tells_each_check(tmp_path: Path) -> None:
    file = tmp_path / "query.json"
    file.write_text(json.dumps(QUERY))
    answer = json.loads(
        hp_tool("explain", *traces(tmp_path), "--query", str(file), "--json").stdout
    )
    states = {each["name"]: each["state"] for each in answer["checks"]}
    assert states == dict.fromkeys(
        ("device", "ranks", "matmul_flops", "backward", "optimizer"), "matches"
    )
    assert (
        answer["teaches"] == "applied"
        and answer["report"]["measurement"]["parts_s"]["compute"] > 0.0
    )
