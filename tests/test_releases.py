"""A release is text: a number is taken where it is certain what was written, and refused where a
zero may be lost.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from hp_tool.errors import InputError
from hp_tool.questions import schema

TRAINING: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "training": {"sequence_length": 4096, "global_batch_size": 8},
}
SERVING: dict[str, Any] = {
    "kind": "inference",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "inference": {"input_length": 512, "output_length": 64, "concurrency": 8},
}
SECTIONS = [(TRAINING, "training", "framework_version"), (SERVING, "inference", "engine_version")]


def written(query: dict[str, Any], section: str, key: str, value: Any) -> dict[str, Any]:
    return {**query, section: {**query[section], key: value}}


def asked(query: dict[str, Any], section: str, key: str, value: str, *, as_json: bool) -> Any:
    """What a query with that text behind the key says, read from JSON or YAML."""
    text = json.dumps(written(query, section, key, "RELEASE")).replace('"RELEASE"', value)
    parsed = schema.parse_query(text if as_json else text.replace('"kind"', "kind", 1))
    return getattr(getattr(parsed, section), key)


@pytest.mark.parametrize(("query", "section", "key"), SECTIONS)
@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    ("value", "release"),
    [("26.06", "26.06"), ("0.16", "0.16"), ('"26.1"', "26.1"), ('"0.10"', "0.10")],
)
def test_a_release_is_read_as_it_is_written(
    query: dict[str, Any], section: str, key: str, as_json: bool, value: str, release: str
) -> None:
    assert asked(query, section, key, value, as_json=as_json) == release


@pytest.mark.parametrize(("query", "section", "key"), SECTIONS)
@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("value", ["0.1", "26.1", "26.10", "26", "26.0"])
def test_a_number_that_may_have_lost_a_zero_is_refused(
    query: dict[str, Any], section: str, key: str, as_json: bool, value: str
) -> None:
    with pytest.raises(InputError, match="write it in quotes") as error:
        asked(query, section, key, value, as_json=as_json)
    assert error.value.field == f"{section}.{key}"


def test_a_mapping_s_number_follows_the_same_rule() -> None:
    parsed = schema.parse_query(written(TRAINING, "training", "framework_version", 26.06))
    assert parsed.training is not None and parsed.training.framework_version == "26.06"
    with pytest.raises(InputError, match="write it in quotes"):
        schema.parse_query(written(TRAINING, "training", "framework_version", 26.1))


def test_other_wrong_types_keep_their_message() -> None:
    with pytest.raises(InputError, match="expected a valid string"):
        schema.parse_query(written(TRAINING, "training", "framework_version", True))
