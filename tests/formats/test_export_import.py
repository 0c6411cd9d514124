"""What is exported is what was predicted: each row of a ranking, written in a tool's words, read
again and predicted, takes the same time and memory; or it is refused, naming the field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hp_tool.domain.result import Estimate
from hp_tool.domain.serving import InferenceEstimate
from hp_tool.errors import HpToolError, InputError, UnsupportedError
from hp_tool.formats.exchange import read_configuration
from hp_tool.formats.exchange.export import write_configuration
from hp_tool.formats.reading import ImportRefusedError
from hp_tool.formats.registry import readable, writable
from hp_tool.questions import schema, serving, training
from hp_tool.questions.configuration import Configuration
from tests.formats import drawn

READERS = {"slurm": "megatron-lm", "kubernetes": "megatron-lm", "megatron-lm-yaml": "nemo"}
"""Formats whose files are read as another's."""
UNSAID = (
    "model",
    "cluster",
    "constraints",
    "targets",
    "training.framework_version",
    "training.total_tokens",
    "training.expert_imbalance",
    "training.recipe",
    *(
        f"inference.{name}"
        for name in (
            "input_length",
            "output_length",
            "concurrency",
            "request_rate_per_second",
            "prefix_cache_hit_rate",
            "expert_imbalance",
            "engine_settings",
        )
    ),
)
"""What no file says: the model's shape behind its name, the devices, what is wanted of the answer,
the release that is installed, how the engine was tuned, and the load.
"""
IN_THE_SCRIPT = dict.fromkeys(
    ("accelerate", "deepspeed", "verl"), ("training.attention", "training.dropout")
) | {"accelerate": ("training.attention", "training.dropout", "training.optimizer")}
"""What a tool leaves to the training script, which the file does not start."""
UNREAD = {"verl": "uneven stages are not read from it"}
"""What a tool can be told and its reader refuses by name."""
MANY_ROWS = 13
ROWS = [2, pytest.param(MANY_ROWS, marks=pytest.mark.components)]
"""Rows of each format that are written and read back."""
MANY = 120
"""Rankings drawn of each format."""


def imported(text: str, *, format: str, configuration: Configuration) -> dict[str, Any]:
    """The file read again, with what it cannot say; what the reader finds missing is given from the
    row as well.
    """
    known = drawn.leaves(configuration.mapping())
    given = {
        path: known[path] for path in (*UNSAID, *IN_THE_SCRIPT.get(format, ())) if path in known
    }
    try:
        return read_configuration(text, format=READERS.get(format, format), overrides=given).query
    except ImportRefusedError as error:
        if error.reading.refused:
            raise
        given |= {
            each.field: known[each.field] for each in error.reading.missing if each.field in known
        }
        return read_configuration(text, format=READERS.get(format, format), overrides=given).query


def figures(estimate: Estimate | InferenceEstimate) -> dict[str, float]:
    assert estimate.memory is not None
    if isinstance(estimate, Estimate):
        assert estimate.time is not None
        return {"step_s": estimate.time.step_s, "memory_bytes": estimate.memory.total_bytes}
    latencies = {
        "ttft_s": estimate.ttft_s or 0.0,
        "tpot_s": estimate.tpot_s or 0.0,
        "tokens_per_second": estimate.output_tokens_per_second_per_gpu or 0.0,
    }
    return latencies | {"memory_bytes": estimate.memory.total_bytes}


def check(query: dict[str, Any], *, format: str) -> int:
    """How many rows were written; each of them comes back the same."""
    asked = schema.parse_query(query)
    room = serving if asked.kind == "inference" else training
    try:
        rows = room.recommend(query=asked, top=3).recommendations
    except (InputError, UnsupportedError):
        return 0  # no such training under this framework, which says so
    written = 0
    for row in rows:
        configuration = Configuration.from_row(row, query=asked)
        try:
            exported = write_configuration(configuration, format)
        except HpToolError as refused:
            assert isinstance(refused, UnsupportedError | InputError) and refused.message
            continue
        if any(" a step takes " in note for note in exported.notes):
            continue  # it states less than the row has
        text = exported.text
        try:
            again = schema.parse_query(imported(text, format=format, configuration=configuration))
        except ImportRefusedError as refused:
            assert UNREAD.get(format, "no reason") in refused.message
            continue
        after = room.estimate(query=again, with_fixes=False)
        ours, theirs = (
            drawn.leaves(configuration.mapping()),
            drawn.leaves(schema.query_mapping(again)),
        )
        differing = {
            path: (ours.get(path), theirs.get(path))
            for path in sorted(ours.keys() | theirs.keys())
            if ours.get(path) != theirs.get(path)
            and not isinstance(ours.get(path, theirs.get(path)), dict)
        }
        assert after.memory is not None, (after.reasons, differing, text)
        assert figures(after) == pytest.approx(figures(row.estimate), rel=1e-9), (differing, text)
        written += 1
    return written


def check_some(draw: Callable[..., dict[str, Any]], *, format: str, rows: int) -> None:
    """Check rankings until `rows` of their rows were written."""
    written = 0
    for seed in range(MANY):
        if written >= rows:
            break
        written += check(draw(seed, format=format), format=format)
    assert written >= rows


def test_two_hundred_rows_are_drawn_of_all_that_is_written_and_read() -> None:
    drawn_formats = {*drawn.TOOLS, *drawn.ENGINES}
    read = {READERS.get(name, name) for name in drawn_formats}
    assert drawn_formats == {*writable()} and read <= {*readable()}
    assert len(drawn_formats) * MANY_ROWS >= 200


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("format", drawn.TOOLS)
def test_a_training_that_is_exported_comes_back_as_it_was_predicted(format: str, rows: int) -> None:
    check_some(drawn.training, format=format, rows=rows)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("format", drawn.ENGINES)
def test_a_deployment_that_is_exported_comes_back_as_it_was_predicted(
    format: str, rows: int
) -> None:
    check_some(drawn.serving, format=format, rows=rows)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(MANY))
@pytest.mark.parametrize("format", drawn.TOOLS)
def test_many_trainings_that_are_exported_come_back(format: str, seed: int) -> None:
    check(drawn.training(seed, format=format), format=format)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(MANY))
@pytest.mark.parametrize("format", drawn.ENGINES)
def test_many_deployments_that_are_exported_come_back(format: str, seed: int) -> None:
    check(drawn.serving(seed, format=format), format=format)
