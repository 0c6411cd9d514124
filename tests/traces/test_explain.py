"""A recorded step beside its prediction: differences by part, sentences by seconds, and changes
with what they win.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import hp_tool
from hp_tool.cli.main import build
from hp_tool.domain.parts import COMMUNICATION
from hp_tool.errors import InputError
from hp_tool.questions import schema
from hp_tool.traces.explain.explanation import explain
from hp_tool.traces.explain.parts import step_parts
from hp_tool.traces.timeline import KINDS, Collectives, Group, RankEvents
from tests.timeline.made import training, write

QUERY = {
    "kind": "training",
    "model": "qwen3-30b-a3b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 32},
    "training": {"sequence_length": 4096, "global_batch_size": 128},
    "parallel": {"pipeline_parallel_size": 2, "expert_parallel_size": 16, "micro_batch_size": 1},
}
MESSAGES, PAUSES = 20, 100
RUNS = {
    "compute": "matmul",
    "attention": "attention",
    "recompute": "matmul",
    "optimizer": "optimizer",
    "offload": "copy_host",
}


def recorded(parts_s: dict[str, float], *, steps: int = 3) -> RankEvents:
    """One rank whose steps take these seconds: one event for each part, one after the other, the
    overhead last.
    """
    rows: list[tuple[str, float, float]] = []
    spans, now = [], 0.0
    for _ in range(steps):
        begin = now
        for part, seconds in parts_s.items():
            if part in ("overhead", "pipeline_bubble"):
                continue
            # Of equal messages between stages the longest one waits for its sender.
            pieces = MESSAGES if part == "pipeline_p2p" else PAUSES if part == "compute" else 1
            waits = parts_s["pipeline_bubble"] if part == "pipeline_p2p" else 0.0
            for piece in range(pieces):
                length = seconds / pieces + waits * (piece == 0)
                rows.append((part, now, now + length))
                if part == "compute" and piece < PAUSES / 2:  # hidden
                    rows.append(("data_parallel", now, now + length))
                now += length + parts_s["overhead"] / PAUSES * (part == "compute")
        spans.append((begin, now))
    groups = tuple(Group(part=part, ranks=(0, 1, 2, 3)) for part in COMMUNICATION)
    sent = [(place, part) for place, (part, _, _) in enumerate(rows) if part in COMMUNICATION]
    start = np.array([row[1] for row in rows])
    return RankEvents(
        rank=0,
        start_s=start,
        end_s=np.array([row[2] for row in rows]),
        kind=np.array([KINDS.index(RUNS.get(part, "collective")) for part, _, _ in rows]),
        launch_s=start,
        thread=np.zeros(len(rows), dtype=np.int64),
        collectives=Collectives(
            event=np.array([place for place, _ in sent]),
            operation=np.zeros(len(sent), dtype=np.int64),
            group=np.array([COMMUNICATION.index(part) for _, part in sent]),
            size_bytes=np.full(len(sent), np.nan),
        ),
        groups=groups,
        steps_s=np.array(spans),
        on_device=False,
    )


@pytest.fixture(scope="module")
def predicted() -> dict[str, float]:
    time = hp_tool.estimate(QUERY).estimate.time
    return dict(time.parts_s)


def test_a_step_as_predicted_has_no_difference_worth_a_sentence(
    predicted: dict[str, float],
) -> None:
    answer = explain([recorded(predicted)], query=schema.parse_query(QUERY))
    assert answer.step_s == pytest.approx(sum(predicted.values()))
    assert max(abs(part.excess_s) for part in answer.parts) < 1e-9
    assert not answer.faults and not any(
        "longer than predicted" in each.text for each in answer.findings
    )


def test_slow_exchanges_are_named_first_with_a_change_that_wins_of_them(
    predicted: dict[str, float],
) -> None:
    slow = predicted | {"expert_parallel": 3.0 * predicted["expert_parallel"]}
    answer = explain([recorded(slow)], query=schema.parse_query(QUERY), tool="megatron-lm")
    first = answer.parts[0]
    assert first.name == "expert_parallel" and first.excess_s == pytest.approx(
        2.0 * predicted["expert_parallel"]
    )
    assert sum(part.excess_s for part in answer.parts) == pytest.approx(
        answer.step_s - answer.estimate.time.step_s
    )
    assert (
        "Expert all-to-all" in answer.findings[0].text
        and "33% of the expected bandwidth" in answer.findings[0].text
    )
    change = next(each for each in answer.suggestions if each.part == "expert_parallel")
    low, high = change.seconds_interval
    assert low < change.seconds < high <= answer.step_s
    assert change.flags and all(str(each["flag"]).startswith("--") for each in change.flags)
    assert change.change in answer.findings[0].text
    assert answer.findings[0].set == change.changed and change.changed
    assert all(path.partition(".")[0] in ("parallel", "training") for path in change.changed)


def test_parts_whose_errors_are_independent_have_the_steps_error_together() -> None:
    """Two parts of 3 s and 4 s; ln of the 90% bounds of the step is 0.5. By hand: each part's is
    0.5 / sqrt((3/7)^2 + (4/7)^2) = 0.7, and hypot(3 x 0.7, 4 x 0.7) / 7 = 0.5.
    """
    real = hp_tool.estimate(QUERY).estimate
    estimate = replace(
        real,
        time=replace(real.time, step_s=7.0, parts_s={"compute": 3.0, "optimizer": 4.0}),
        intervals=replace(real.intervals, step_s=(7.0 * math.exp(-0.5), 7.0 * math.exp(0.5))),
    )
    parts = step_parts(
        {"compute": 5.0, "optimizer": 4.0},
        estimate,
        covers={"compute": ("compute",), "optimizer": ("optimizer",)},
    )
    assert [part.excess_s for part in parts] == [2.0, 0.0]
    for part in parts:
        low, high = part.interval
        assert math.log(part.predicted_s / low) == pytest.approx(0.7)
        assert math.log(high / part.predicted_s) == pytest.approx(0.7)


def test_without_a_query_parts_have_no_prediction(predicted: dict[str, float]) -> None:
    parts = explain([recorded(predicted)]).parts
    assert {part.name: part.measured_s for part in parts} == pytest.approx(
        {"unknown": 0.0} | predicted, abs=1e-9
    )
    assert {(part.predicted_s, part.interval) for part in parts} == {(None, None)}


def test_what_a_change_wins_is_what_the_tool_predicts_of_it_times_what_was_measured(
    predicted: dict[str, float],
) -> None:
    plain = explain([recorded(predicted)], query=schema.parse_query(QUERY))
    slow = explain(
        [recorded({part: 2.0 * seconds for part, seconds in predicted.items()})],
        query=schema.parse_query(QUERY),
    )
    parts = {each.part: each for each in plain.suggestions}
    assert parts and {each.part for each in slow.suggestions} >= set(parts)
    # Of an overhead no more is won than was predicted, however long it was measured.
    launched = {each.change for each in slow.suggestions if each.part == "overhead"}
    grown = [
        each for each in slow.suggestions if each.part in parts and each.change not in launched
    ]
    assert grown and all(each.seconds >= parts[each.part].seconds for each in grown)
    changed = next(iter(parts.values()))
    mapping = QUERY | {"parallel": schema.to_dict(changed.parallel)}
    after = hp_tool.estimate(
        mapping | changed.set if "training" in changed.set else mapping
    ).estimate.time.step_s
    assert plain.estimate.time.step_s - after == pytest.approx(changed.seconds, rel=0.2)


def test_an_overlap_that_the_step_looks_to_be_without_is_suggested() -> None:
    alone = {
        "model": "llama-3-8b",
        "parallel": {"tensor_parallel_size": 4},
        "training": QUERY["training"],
    }
    alone["training"] = alone["training"] | {"overlap": {"data_parallel": False}}
    query = schema.parse_query(QUERY | alone)
    without = hp_tool.estimate(query).estimate.time.parts_s
    answer = explain([recorded(dict(without))], query=query)
    change = next(each for each in answer.suggestions if each.set)
    assert (
        change.set["training.overlap"]["data_parallel"] is True and change.part == "data_parallel"
    )
    assert {"flag": "training.overlap.data_parallel", "from": "False", "to": "True"} in change.flags


def test_what_cannot_be_explained_is_refused(predicted: dict[str, float]) -> None:
    with pytest.raises(InputError, match="no kernel"):
        explain([])
    impossible = QUERY | {"parallel": {"tensor_parallel_size": 3}}
    with pytest.raises(InputError, match="configuration cannot run"):
        explain([recorded(predicted)], query=schema.parse_query(impossible))
    serving = {
        "kind": "inference",
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1},
    }
    serving |= {"inference": {"input_length": 128, "output_length": 128, "concurrency": 4}}
    with pytest.raises(InputError, match="training queries only"):
        explain([recorded(predicted)], query=schema.parse_query(serving))


@pytest.fixture
def traces(tmp_path: Path) -> list[str]:
    return [str(path) for path in write(training(fault="slow_link"), tmp_path)]


def test_the_command_prints_ranks_links_and_sentences(traces: list[str]) -> None:
    result = CliRunner().invoke(build(), ["explain", *traces])
    assert result.exit_code == 0, result.output
    assert "(4 steps, 4 ranks)" in result.output
    assert "1. Tensor-parallel communication of ranks 2, 3 takes 5.0" in result.output


def test_the_command_answers_in_json_what_python_does(traces: list[str], tmp_path: Path) -> None:
    (tmp_path / "query.json").write_text(json.dumps(QUERY))
    result = CliRunner().invoke(
        build(), ["explain", *traces, "--query", str(tmp_path / "query.json"), "--json"]
    )
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer == json.loads(schema.to_json(hp_tool.explain(*traces, query=QUERY)))
    assert answer["faults"][0]["kind"] == "slow_link" and answer["trace_query"] == {
        "parallel.tensor_parallel_size": 2
    }
    both = CliRunner().invoke(build(), ["explain", *traces, "--query", "a", "--import", "b"])
    assert isinstance(both.exception, InputError)
