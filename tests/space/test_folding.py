"""The space of a mixture of experts against the folding of its groups that Megatron Core
accepts.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hp_tool.catalog import cluster
from hp_tool.catalog.efficiency import engine_efficiency
from hp_tool.cost.candidates import DISPATCHERS, Candidates
from hp_tool.cost.matrices import expert_matrices
from hp_tool.cost.matrix import entries
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.experts import expert_weights
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery, TokenDispatcher
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions.serving.problem import serving_case
from hp_tool.space import default_axes, legal_chunks
from tests.conftest import skip_or_fail
from tests.cost.cases import case_of

RANKS = 16
SIZES = ((1, 2, 3, 4), (1, 2), (1, 2), (1, 2, 3, 4, 8, 16), (1, 2, 4, 5))
"""Values of tensor, pipeline, context, expert and expert tensor parallelism, some of which divide
nothing.
"""
NAMES = ("tensor", "pipeline", "context", "expert", "expert_tensor")
MODEL = ModelSpec(
    num_hidden_layers=4,
    hidden_size=64,
    num_attention_heads=8,
    intermediate_size=96,
    vocab_size=256,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=96,
)
WORDS = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "ffn_hidden_size": 96,
    "moe_ffn_hidden_size": 96,
    "moe_router_topk": 2,
}


def candidates(
    gpu: str, *, model: ModelSpec = MODEL, release: str | None = None, **parallel: object
) -> Candidates:
    workload = TrainingWorkload(
        sequence_length=256, global_batch_size=16, framework_version=release
    )
    case = case_of(
        model=model, workload=workload, cluster=cluster(ClusterQuery(gpu=gpu, num_gpus=RANKS))
    )
    query = ParallelQuery(micro_batch_size=1, recompute="none", zero_stage=1, **parallel)  # type: ignore[arg-type]
    chunks = legal_chunks(axes=default_axes(query=query, case=case), case=case)
    return Candidates.concatenate([chunk.candidates for chunk in chunks])


CASES = random.Random(7).sample(list(itertools.product(*SIZES)), 200)
REPLICATED = [(10, 2), (12, 4), (16, 8)]
"""(8 experts and second copies of some, ranks that share them)."""


@pytest.fixture(scope="module")
def counted() -> dict[tuple[int, ...], int]:
    """Parameters of a rank's experts by Megatron Core; 0 where it refuses."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        skip_or_fail(
            component="MEGATRON",
            reason="torch and megatron-core (the profiler extra) are not installed",
        )
    cases = [(8, *case) for case in CASES] + [
        (slots, 1, 1, 1, ranks, 1) for slots, ranks in REPLICATED
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.space.megatron_folding", json.dumps([WORDS, RANKS, cases])],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.components
def test_every_folding_that_megatron_accepts_is_in_the_space_and_no_other(
    counted: dict[tuple[int, ...], int],
) -> None:
    accepted = {case for case in CASES if counted[8, *case]}
    assert 30 < len(accepted) < 170
    axes = {f"{name}_parallel_size": values for name, values in zip(NAMES, SIZES, strict=True)}
    found = candidates(
        "h100-sxm-80gb",
        **axes,
        virtual_pipeline_parallel_size=1,
        moe_token_dispatcher_type="alltoall",
    )
    legal = set(zip(*(getattr(found, axis).tolist() for axis in axes), strict=True))
    assert {case for case in CASES if case in legal} == accepted


@pytest.mark.components
def test_a_rank_holds_the_experts_that_megatron_gives_it(
    counted: dict[tuple[int, ...], int],
) -> None:
    for case in CASES:
        *_, ep, etp = case
        if size := counted[8, *case]:
            assert entries(expert_matrices(MODEL, expert=ep, expert_tensor=etp)) == size


@pytest.mark.components
@pytest.mark.parametrize(("slots", "ranks"), REPLICATED)
def test_second_copies_of_experts_take_the_memory_of_experts(
    counted: dict[tuple[int, ...], int], slots: int, ranks: int
) -> None:
    """A serving rank with redundant experts against Megatron's with as many experts as there are
    slots.
    """
    load = InferenceWorkload(
        input_length=16, output_length=16, concurrency=1, precision="bf16", engine="sglang"
    )
    machine = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=RANKS))
    case = serving_case(
        model=MODEL,
        cluster=machine,
        workload=load,
        engine=engine_efficiency(engine="sglang", version=None),
    )
    config = ServingConfig(
        attention_data_parallel_size=ranks,
        expert_parallel_size=ranks,
        redundant_experts=slots - 8,
        data_parallel_size=RANKS,
    )
    held = counted[slots, 1, 1, 1, ranks, 1]
    assert (
        expert_weights(case, ServingCandidates.from_configs([config], concurrency=[1])) == held > 0
    )


@pytest.mark.parametrize(
    ("gpu", "release", "expected"),
    [
        ("h100-sxm-80gb", None, {"alltoall", "flex"}),
        ("gb200-nvl72", "26.06", {"alltoall", "flex"}),
        ("h100-sxm-80gb", "24.07", {None}),
        ("l40s-48gb", None, {None}),
        ("v100-sxm-32gb", None, {None}),
        ("mi300x", None, {None}),
    ],
)
def test_a_ranking_tries_the_dispatchers_of_its_release_and_gpus(
    gpu: str, release: str | None, expected: set[TokenDispatcher | None]
) -> None:
    found = candidates(gpu, release=release)
    dispatched = (found.expert_parallel_size * found.expert_tensor_parallel_size) > 1
    assert {DISPATCHERS[code] for code in found.moe_token_dispatcher_type[dispatched]} == expected
    assert not found.moe_token_dispatcher_type[~dispatched].any(), "nothing to dispatch: each once"


def test_each_division_is_tried_once_by_each_dispatcher() -> None:
    one, two = (
        candidates("h100-sxm-80gb", moe_token_dispatcher_type=kinds)
        for kinds in ("flex", ("allgather", "flex", "alltoall"))
    )
    dispatched = int(((one.expert_parallel_size * one.expert_tensor_parallel_size) > 1).sum())
    counts = Counter(DISPATCHERS[code] for code in two.moe_token_dispatcher_type.tolist())
    assert counts == {
        None: len(one) - dispatched,
        "allgather": dispatched,
        "flex": dispatched,
        "alltoall": dispatched,
    }


def test_experts_are_split_where_there_are_more_gpus_than_experts() -> None:
    few, many = (
        candidates("h100-sxm-80gb", model=replace(MODEL, num_experts=count)) for count in (8, 16)
    )
    assert set(few.expert_tensor_parallel_size.tolist()) == {1, 2}
    assert set(many.expert_tensor_parallel_size.tolist()) == {1}
