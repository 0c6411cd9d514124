"""Every Megatron script that is exported passes the checks of the release that it is for."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from hp_tool.errors import HpToolError, InputError, UnsupportedError
from hp_tool.formats.exchange import read_configuration
from hp_tool.formats.exchange.export import write_configuration, write_text
from hp_tool.questions import schema, training
from hp_tool.questions.configuration import Configuration
from tests.conftest import skip_or_fail
from tests.formats import drawn
from tests.formats.megatron_rules import complaints, configured, line, official
from tests.formats.test_megatron_validation import parsed

RELEASES = {"0.16.1": None, "0.17.1": "0.17.1", "0.18.2": "0.18.2", "0.19.2": "0.19.2"}
"""Releases of Megatron Core, and the `framework_version` of a query for each; a query without one
is for 0.16.
"""
FEW, MANY = 8, 110
MIXTURE = {
    "kind": "training",
    "model": "qwen3-30b-a3b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"sequence_length": 4096, "global_batch_size": 512},
}


def architecture(gpu: str) -> int:
    return 8 if gpu.startswith("a100") else 10 if gpu.startswith(("b200", "gb200")) else 9


WITHOUT = re.compile(r"([\d.]+) s without")
"""Step time of a note about settings that a script cannot state."""


def scripts(query: dict[str, Any], *, top: int = 3) -> list[tuple[str, Configuration, float]]:
    """Return the exported rows of a ranking, each with its configuration and the predicted
    step of what the script states (4 digits), without those refused by name.
    """
    try:
        asked = schema.parse_query(query)
        rows = training.recommend(query=asked, top=top).recommendations
    except HpToolError:
        return []
    found = []
    for row in rows:
        configuration = Configuration.from_row(row, query=asked)
        try:
            exported = write_configuration(configuration, "megatron-lm")
        except UnsupportedError:
            continue
        assert row.estimate.time is not None
        noted = [float(s) for note in exported.notes for s in WITHOUT.findall(note)]
        step_s = noted[-1] if noted else row.estimate.time.step_s
        found.append((exported.text, configuration, step_s))
    return found


def broken(
    text: str, query: dict[str, Any], *, release: str, num_gpus: int
) -> tuple[list[str], dict[str, Any]]:
    """Return the recorded assertions that a script breaks, and the case for the release's own
    validation.
    """
    words, environment = parsed(text)
    said = {
        "world_size": num_gpus,
        "environment": environment,
        "architecture": architecture(query["cluster"]["gpu"]),
    }
    return complaints(words, **said, release=release), {"line": line(words), **said}


def drawn_query(seed: int, *, release: str) -> dict[str, Any]:
    query = drawn.training(seed, format="megatron-lm")
    query["training"].pop("recipe", None)  # which names another release
    query["training"]["framework_version"] = RELEASES[release]
    return query


def check(seeds: range, *, release: str) -> int:
    cases = []
    for seed in seeds:
        query = drawn_query(seed, release=release)
        for text, configuration, _ in scripts(query):
            found, case = broken(
                text,
                query,
                release=release,
                num_gpus=configuration.mapping()["cluster"]["num_gpus"],
            )
            assert found == [], (seed, text)
            cases.append(case)
            if release == "0.16.1":
                configured(parsed(text)[0])
    if release == "0.19.2" and (answers := official(cases)) is not None:
        assert [answer for answer in answers if answer is not None] == []
    return len(cases)


@functools.cache
def needs_megatron() -> None:
    try:
        import megatron.core  # noqa: F401
    except ImportError:
        skip_or_fail(component="MEGATRON", reason="megatron-core is not installed")


@pytest.mark.components
@pytest.mark.parametrize("release", RELEASES)
def test_rows_of_random_rankings_start_in_their_release(release: str) -> None:
    needs_megatron()
    assert check(range(FEW), release=release) > FEW


@pytest.mark.long
@pytest.mark.parametrize("release", RELEASES)
def test_many_rows_of_random_rankings_start_in_their_release(release: str) -> None:
    needs_megatron()
    assert check(range(FEW, MANY), release=release) > MANY


@pytest.mark.components
@pytest.mark.parametrize("release", RELEASES)
def test_the_first_row_of_a_mixture_runs_and_takes_what_was_predicted(release: str) -> None:
    needs_megatron()
    query = {**MIXTURE, "training": {**MIXTURE["training"], "framework_version": RELEASES[release]}}
    [(text, _, step_s)] = scripts(query, top=1)
    assert broken(text, query, release=release, num_gpus=64)[0] == []
    if release == "0.16.1":
        configured(parsed(text)[0])
    given = {"cluster.gpu": "h100-sxm-80gb", "training.framework_version": RELEASES[release]}
    again = read_configuration(
        text, format="megatron-lm", overrides={k: v for k, v in given.items() if v is not None}
    ).query
    estimate = training.estimate(query=schema.parse_query(again), with_fixes=False)
    assert estimate.time is not None and estimate.time.step_s == pytest.approx(step_s, rel=5e-4)


@pytest.mark.parametrize(
    ("knobs", "parallel", "words"),
    [
        ({"cuda_graph_modules": ["attn", "mlp"]}, {}, "mlp"),
        ({"cuda_graph_modules": ["attn", "moe_preprocess"]}, {}, "moe_router"),
        ({"offload": "activations", "overlap": None}, {}, "offloaded activations"),
        ({"expert_capacity_factor": 1.0}, {}, "whole iteration"),
    ],
)
def test_graphs_that_megatron_core_refuses_are_refused_by_name(
    knobs: dict[str, Any], parallel: dict[str, Any], words: str
) -> None:
    work = {
        **MIXTURE["training"],
        "cuda_graphs": True,
        "overlap": {"expert_parallel": True},
        **knobs,
    }
    with pytest.raises(InputError, match=words) as refused:
        training.recommend(query=schema.parse_query({**MIXTURE, "training": work}))
    assert refused.value.field == "training.cuda_graphs"


@pytest.mark.parametrize("release", ["0.18.2", "0.19.2", "26.06.01", "26.08"])
def test_a_loss_that_the_training_loop_refuses_is_not_written(release: str) -> None:
    work = {**MIXTURE["training"], "framework_version": release, "cross_entropy": "in_place"}
    query = {
        **MIXTURE,
        "training": work,
        "parallel": {"expert_parallel_size": 8, "micro_batch_size": 1},
    }
    with pytest.raises(InputError, match=r"0\.18\.2") as refused:
        asked = schema.parse_query(query)
        row = training.recommend(query=asked, top=1).recommendations[0]
        configuration = Configuration.from_row(row, query=asked)
        assert "cross_entropy_fusion_impl=te" in write_text(configuration, "nemo").replace(" ", "")
        write_text(configuration, "megatron-lm")
    assert refused.value.field == "training.cross_entropy"


def test_recorded_assertions_find_what_was_exported_before() -> None:
    said: dict[str, Any] = {"world_size": 8, "environment": {}, "architecture": 9}
    words = {
        "global-batch-size": ["8"],
        "micro-batch-size": ["1"],
        "num-layers": ["2"],
        "seq-length": ["8"],
        "max-position-embeddings": ["8"],
        "num-experts": ["8"],
        "expert-model-parallel-size": ["8"],
        "cross-entropy-loss-fusion": [],
        "cross-entropy-fusion-impl": ["te"],
        "overlap-moe-expert-parallel-comm": [],
        "cuda-graph-impl": ["local"],
        "cuda-graph-scope": ["full_iteration"],
        "no-check-for-nan-in-loss-and-grad": [],
        "moe-pad-experts-for-cuda-graph-inference": [],
    }
    assert complaints(words, **said, release="0.16.1") == [
        "merged passes record no whole iteration"
    ]
    assert complaints(words, **said, release="0.19.2") == ["Transformer Engine's loss is refused"]
