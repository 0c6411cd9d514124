"""What `hp-tool batch` reads: YAML streams and CSV grids beside JSON lines."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.cli.batches import sources
from hp_tool.errors import InputError

Run = Callable[..., Any]
BASE = """
kind: training
model: gpt-22b
cluster: {gpu: a100-sxm-80gb, num_gpus: 8}
training: {sequence_length: 2048, global_batch_size: 16}
parallel: {tensor_parallel_size: 8, micro_batch_size: 4, recompute: selective}
"""


def items(text: str, format: sources.Format, **base: Any) -> list[Any]:
    found = sources.read_items(io.BytesIO(text.encode()), format=format, base=base)
    return [item if isinstance(item, InputError) else json.loads(item) for item in found]


def test_a_yaml_stream_is_answered_document_by_document(entry_point: Run, tmp_path: Path) -> None:
    documents = [f"id: a\n{BASE}", "# a comment alone", "kind: [training", f"id: z # last\n{BASE}"]
    (tmp_path / "queries.yaml").write_text("\n---\n".join(documents))
    answers = [
        json.loads(line) for line in entry_point("batch", "queries.yaml").stdout.splitlines()
    ]
    assert [(answer["id"], answer["status"]) for answer in answers] == [
        ("a", "ok"),
        (None, "error"),
        ("z", "ok"),
    ]
    assert answers[1]["error"]["code"] == "syntax"


def test_separators_of_yaml() -> None:
    assert items("--- {a: 1}\n...\n---\na: |\n  ---\n---x: 2\n", "yaml") == [
        {"a": 1},
        {"a": "---\n", "---x": 2},
    ]


def test_documents_that_are_too_long_stay_alone() -> None:
    long, after = items("a: " + "x" * 2_500_000 + "\nb: 1\n---\nc: 2\n", "yaml")
    assert (long.code, after) == ("too_large", {"c": 2})


def test_a_grid_is_every_combination_of_a_row(entry_point: Run, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    grid = (
        'id,tp,mbs,parallel.recompute\nfirst,"2,4,8","1,2",\n,8,4,"{granularity: full, method: '
        'block, num_layers: 4}"\n'
    )
    (tmp_path / "grid.csv").write_text(grid)
    result = entry_point("batch", "grid.csv", "--base=base.yaml")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    ids = [f"first tp={tp} mbs={mbs}" for tp in (2, 4, 8) for mbs in (1, 2)]
    assert [answer["id"] for answer in answers] == [*ids, "2"]
    assert [answer["status"] for answer in answers] == ["ok"] * 7
    chosen = [answer["estimate"]["parallel"] for answer in answers]
    assert [(one["tensor_parallel_size"], one["micro_batch_size"]) for one in chosen[:2]] == [
        (2, 1),
        (2, 2),
    ]
    assert chosen[0]["recompute"] == "selective"  # an empty cell leaves the base's
    assert (chosen[-1]["recompute"]["granularity"], chosen[-1]["recompute"]["num_layers"]) == (
        "full",
        4,
    )


def test_brackets_hold_one_value_together() -> None:
    assert items('tp,pp\n"[1, 2]",4\n', "csv") == [
        {
            "parallel": {"tensor_parallel_size": [1, 2], "pipeline_parallel_size": 4},
            "kind": "training",
            "id": "1",
        }
    ]


def test_a_bad_row_harms_only_itself() -> None:
    short, broken, good = items('model,tp\nx\n"{",1\ny,2\n', "csv")
    assert "1 cells under 2 columns" in short.message
    assert "row 2, model" in broken.message
    assert good["parallel"] == {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("header", "near"),
    [("tpp", "did you mean tp"), ("tp,parallel.tensor_parallel_size", "more than one")],
)
def test_a_bad_header_ends_the_batch(entry_point: Run, header: str, near: str) -> None:
    result = entry_point("batch", "-", "--format=csv", stdin=f"{header}\n1,1\n")
    assert (result.returncode, result.stdout) == (2, "")
    assert near in result.stderr


def test_a_byte_order_mark_and_serving_columns() -> None:
    (query,) = items("\ufeffmodel,inference.concurrency\nqwen3-32b,64\n", "csv")
    assert query == {
        "model": "qwen3-32b",
        "inference": {"concurrency": 64},
        "kind": "inference",
        "id": "1",
    }


def test_a_base_is_for_grids(entry_point: Run) -> None:
    assert entry_point("batch", "-", "--base=base.yaml", stdin="{}\n").returncode == 2


@given(
    st.lists(
        st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True), min_size=1, max_size=4
    )
)
def test_grids_multiply(axes: list[list[int]]) -> None:
    names = ["tp", "pp", "cp", "mbs"][: len(axes)]
    cells = ",".join('"' + ",".join(map(str, axis)) + '"' for axis in axes)
    found = items(f"{','.join(names)}\n{cells}\n", "csv")
    size = 1
    for axis in axes:
        size *= len(axis)
    assert (
        len({json.dumps(query["parallel"]) for query in found})
        == len({query["id"] for query in found})
        == size
    )


def test_what_was_read_before_reading_failed_is_answered(entry_point: Run, tmp_path: Path) -> None:
    rows = ["model,cluster.gpu,cluster.num_gpus", *["gpt-22b,a100-sxm-80gb,8"] * 3, "x" * 1_100_000]
    (tmp_path / "grid.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "base.yaml").write_text(BASE)
    result = entry_point("batch", "grid.csv", "--base=base.yaml", "--output=answers.jsonl")
    assert result.returncode == 2
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 3
