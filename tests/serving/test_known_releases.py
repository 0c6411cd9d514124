"""Releases that a query names: unknown ones are rejected with the known ones, and a named one's
constants are used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hp_tool
from hp_tool.catalog import library
from hp_tool.catalog.efficiency import engine_profiles
from hp_tool.catalog.releases import check_release, release_age
from hp_tool.errors import InputError
from hp_tool.wording.words import assumption_sentences
from tests.command_line import hp_tool as command_line


def trained(version: str | None, framework: str = "megatron-core") -> dict[str, Any]:
    work = {
        "sequence_length": 8192,
        "global_batch_size": 128,
        "framework": framework,
        "framework_version": version,
    }
    return {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100", "num_gpus": 8},
        "training": {name: value for name, value in work.items() if value is not None},
        "parallel": {"tensor_parallel_size": 2},
    }


def served(version: str | None, engine: str = "vllm", gpu: str = "h100") -> dict[str, Any]:
    load = {
        "input_length": 1000,
        "output_length": 100,
        "concurrency": 16,
        "engine": engine,
        "precision": "fp8",
    }
    return {
        "kind": "inference",
        "model": "llama-3.1-8b",
        "cluster": {"gpu": gpu, "num_gpus": 1},
        "inference": load | ({} if version is None else {"engine_version": version}),
        "parallel": {"tensor_parallel_size": 1},
    }


UNKNOWN = [
    *(
        (trained(version), "training.framework_version", "26.08")
        for version in ("0.8.0", "0.16.0", "99.99", "29.01", "nightly")
    ),
    (trained("0.18.3", "hf-trainer"), "training.framework_version", "remove"),
    *(
        (served(version), "inference.engine_version", "0.24.0")
        for version in ("0.99.0", "99.99", "0.24.7", "latest")
    ),
    (served("0.6.0", "sglang"), "inference.engine_version", "0.5.16"),
]


@pytest.mark.parametrize(("query", "field", "known"), UNKNOWN)
def test_an_unknown_release_is_rejected_with_the_known_ones(
    query: dict[str, Any], field: str, known: str
) -> None:
    for ask in (hp_tool.estimate, hp_tool.recommend):
        with pytest.raises(InputError) as error:
            ask(query)
        assert (error.value.code, error.value.field) == (
            "unknown_release",
            field,
        ) and known in error.value.message
    run = command_line("estimate", "-", "--json", stdin=json.dumps(query))
    assert (
        run.returncode == 2
        and json.loads(run.stdout or run.stderr)["error"]["code"] == "unknown_release"
    )


@pytest.mark.parametrize(
    "version", ["26.08", "26.02.01", "26.02", "0.16", "0.16.1", "core_v0.18.2", "0.12", "24.11.1"]
)
def test_known_releases_and_their_series_are_answered(version: str) -> None:
    assert hp_tool.estimate(trained(version)).estimate.feasible


def test_a_new_release_needs_a_row_of_data_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "releases"
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        'entries: {vllm: {releases: ["0.34.0"]}, megatron-core: {releases: ["26.10"]}}'
    )
    with pytest.raises(InputError):
        hp_tool.estimate(served("0.34.0"))
    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path))
    library.clear_cache()
    assert hp_tool.estimate(served("0.34.0")).estimate.provenance["constants_release"] == "0.24.0"
    assert hp_tool.estimate(trained("26.10")).estimate.feasible
    assert hp_tool.estimate(served("0.24.0")).estimate.feasible, "the built-in ones stay known"
    monkeypatch.delenv("HP_CATALOG_DIR")
    library.clear_cache()


def test_every_release_with_constants_is_known() -> None:
    for profile in engine_profiles():
        check_release(profile.engine, profile.version, field="inference.engine_version")
    for name in library.names("recipes"):
        for rule in library.entry("recipes", name).fields.get("rules", []):
            if version := rule.get("training", {}).get("framework_version"):
                check_release("megatron-core", version, field="training.framework_version")


@pytest.mark.parametrize(
    ("engine", "version", "gpu", "used"),
    [
        ("trtllm", "1.1", "h100", "1.1"),
        ("trtllm", "1.1.0", "h200", "1.1"),
        (
            "trtllm",
            "1.2.0",
            "a100",
            "0.17",
        ),  # no constants of its own: the nearest release with runs on this die
        ("trtllm", "1.0.0rc3", "b200", "1.0.0rc3"),
        ("sglang", "0.5.6.post2", "a100", "0.5.6.post2"),
        ("vllm", "0.33.0", "h100", "0.24.0"),
        ("vllm", "0.12.0", "b200", "0.12.0"),
        ("trtllm", None, "h100", "1.0.0rc3"),
        ("trtllm", None, "b200", "1.1"),
        ("vllm", None, "b200", "0.12.0"),
    ],
)
def test_a_named_release_is_used_and_the_answer_names_it(
    engine: str, version: str | None, gpu: str, used: str
) -> None:
    estimate = hp_tool.estimate(served(version, engine, gpu)).estimate
    assert estimate.provenance["constants_release"] == used
    assert estimate.provenance["engine_efficiency"].split(" (")[0] == f"{engine} {used}"


def test_a_table_shows_which_release_stands_in() -> None:
    for command in ("estimate", "recommend"):
        newer = command_line(command, "-", stdin=json.dumps(served("0.33.0"))).stdout
        assert (
            "Release 0.33.0 has no constants of its own. The constants of vllm 0.24.0" in newer
        ), newer
        several = served("0.33.0") | {
            "cluster": {"gpu": ["h100", "h200"], "num_gpus": 2},
            "parallel": {},
        }
        pools = served("0.33.0") | {"cluster": {"gpu": "h100", "num_gpus": 2}, "parallel": {}}
        pools["inference"]["disaggregated"] = {}
        for query in (several, pools) if command == "recommend" else ():
            assert (
                "The constants of vllm 0.24.0"
                in command_line(command, "-", stdin=json.dumps(query)).stdout
            )
        for version in (None, "0.12.0", "0.12", "v0.24.0"):
            assert (
                "constants of its own"
                not in command_line(command, "-", stdin=json.dumps(served(version))).stdout
            )


def test_a_newer_release_s_interval_is_no_narrower_than_that_of_its_constants() -> None:
    def width(version: str) -> float:
        low, high = hp_tool.estimate(served(version)).estimate.intervals.tpot_s
        return high / low

    assert width("0.13.0") > width("0.12.0")
    assert width("0.33.0") >= width("0.24.0")  # timed kernels alone: the doubt is of a release


@pytest.mark.parametrize(
    ("engine", "release", "behind"),
    [
        ("vllm", "0.33.0", 0),
        ("vllm", "0.31.2", 2),
        ("vllm", "0.12.0", 21),
        ("sglang", "0.5.20", 3),  # whose third number names its minor releases
        ("trtllm", "1.1", 3),
    ],
)
def test_minor_releases_are_counted_from_a_dated_list(
    engine: str, release: str, behind: int
) -> None:
    age = release_age(engine, release)
    assert age is not None and age.minor_releases == behind and age.as_of == "2026-11"
    check_release(engine, age.newest, field="")


def test_an_answer_states_the_age_of_old_constants_alone() -> None:
    old = hp_tool.estimate(served("0.12.0")).estimate.provenance
    assert old["constants_age"] == {
        "newest": "0.33.0",
        "minor_releases": 21,
        "as_of": "2026-11",
    }
    assert (
        "The constants are from vllm 0.12.0, 21 minor releases before 0.33.0 (2026-11)."
        in assumption_sentences(old)
    )
    recent = hp_tool.estimate(served("1.3.0", "trtllm")).estimate.provenance
    assert recent["constants_release"] == "1.3" and "constants_age" not in recent
    assert release_age("megatron-core", "0.16.1") is None
