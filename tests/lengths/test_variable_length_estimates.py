"""`training.sequence_lengths` and `training.packed` in estimates and recommendations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hp_tool.cost.lengths.imbalance import PART
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import OwnFile, Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.training import estimate, recommend

ROW = 16_384


def query(*, parallel: dict[str, Any] | None = None, **training: Any) -> Query:
    workload = {"sequence_length": ROW, "global_batch_size": 64, "total_tokens": 1e9} | training
    return Query(
        kind="training",
        model="llama-3-8b",
        cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=32),
        training=TrainingWorkload(**workload),
        parallel=ParallelQuery(
            **{"tensor_parallel_size": 4, "recompute": "selective"} | (parallel or {})
        ),
    )


def asked(**changes: Any) -> Estimate:
    return estimate(query=query(**changes))


@pytest.fixture
def halves(tmp_path: Path) -> str:
    """Every sequence is half a row."""
    path = tmp_path / "halves.txt"
    path.write_text(f"{ROW // 2}\n")
    return OwnFile(path)


def same_numbers(one: Estimate, other: Estimate) -> None:
    """All but the intervals, which are wider where rows are described by their lengths: no measured
    run had them.
    """
    assert one.time is not None and other.time is not None
    assert one.time.parts_s.pop(PART, 0.0) == other.time.parts_s.pop(PART, 0.0) == 0.0
    for name in ("time", "memory", "tokens_per_second", "mfu", "hfu", "days", "gpu_hours"):
        assert getattr(one, name) == getattr(other, name), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"pipeline_parallel_size": 4},
        {"context_parallel_size": 2, "recompute": "full"},
        {"zero_stage": 3},
    ],
)
def test_full_rows_are_the_plain_model_to_the_last_digit(
    packed: bool, parallel: dict[str, Any]
) -> None:
    same_numbers(
        asked(parallel=parallel, sequence_lengths="full-rows", packed=packed),
        asked(parallel=parallel),
    )


def test_rows_of_two_equal_sequences_are_twice_as_many_shorter_rows(halves: str) -> None:
    packed = asked(sequence_lengths=halves, packed=True, parallel={"micro_batch_size": 1})
    plain = asked(sequence_length=ROW // 2, global_batch_size=128, parallel={"micro_batch_size": 2})
    assert packed.parallel is not None
    same_numbers(replace(packed, parallel=plain.parallel), plain)


def test_padding_takes_the_time_of_full_rows_for_fewer_tokens(halves: str) -> None:
    padded, full = asked(sequence_lengths=halves), asked()
    assert padded.time == full.time and padded.memory == full.memory
    assert padded.tokens_per_second == full.tokens_per_second / 2
    assert padded.days == full.days * 2
    assert 0.4 * full.mfu < padded.mfu < 0.5 * full.mfu  # attention's share shrinks with the square
    assert padded.provenance["row_fill"] == 0.5 and padded.provenance["packed"] is False


def test_packing_computes_only_what_sequences_attend_to() -> None:
    packed = asked(sequence_lengths="synthetic-code", packed=True)
    padded, full = asked(sequence_lengths="synthetic-code"), asked()
    assert padded.tokens_per_second < packed.tokens_per_second
    assert packed.time.parts_s["attention"] < full.time.parts_s["attention"]
    assert packed.time.parts_s["compute"] == pytest.approx(full.time.parts_s["compute"])
    assert packed.time.parts_s["tensor_parallel"] == full.time.parts_s["tensor_parallel"]
    assert packed.memory == full.memory
    assert packed.time.parts_s[PART] > 0
    assert sum(packed.time.parts_s.values()) == pytest.approx(packed.time.step_s, rel=1e-12)
    assert packed.provenance["attended_length"] < ROW


def test_one_replica_without_a_pipeline_waits_for_nobody() -> None:
    alone = asked(
        sequence_lengths="synthetic-code", packed=True, parallel={"context_parallel_size": 8}
    )
    assert alone.parallel.data_parallel_size == 1 and alone.time.parts_s[PART] == pytest.approx(
        0.0, abs=1e-9
    )
    piped = {"context_parallel_size": 4, "pipeline_parallel_size": 2}
    assert (
        asked(sequence_lengths="synthetic-code", packed=True, parallel=piped).time.parts_s[PART] > 0
    )


def test_replicas_that_meet_at_every_micro_batch_wait_longer() -> None:
    once, every = (
        asked(
            sequence_lengths="synthetic-code", packed=True, parallel={"zero_stage": stage}
        ).time.parts_s[PART]
        for stage in (1, 3)
    )
    assert once < every


def test_a_recommendation_is_what_its_estimate_says() -> None:
    asked_for = query(
        sequence_lengths="synthetic-long-sft", packed=True, parallel={"micro_batch_size": 1}
    )
    found = recommend(query=asked_for, top=3).recommendations
    assert [one.estimate.time.step_s for one in found] == sorted(
        one.estimate.time.step_s for one in found
    )
    for one in found:
        again = estimate(query=Configuration.from_row(one, query=asked_for).query)
        assert again.time.step_s == pytest.approx(one.estimate.time.step_s, rel=1e-12)
        assert again.time.parts_s[PART] == pytest.approx(one.estimate.time.parts_s[PART], rel=1e-9)


def test_what_packing_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"requires training\.sequence_lengths") as caught:
        asked(packed=True)
    assert caught.value.code == "missing_field"
    with pytest.raises(UnsupportedError, match="flash"):
        asked(packed=True, sequence_lengths="synthetic-code", attention="unfused")
    with pytest.raises(InputError, match="global_batch_size"):
        asked(packed=True, sequence_lengths="synthetic-code", global_batch_size=1 << 21)
