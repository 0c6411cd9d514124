"""Intervals are as wide as held-out rows scatter, and wider where nobody looked."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency_profile, prediction_doubts
from hp_tool.cost.uncertainty import NORMAL_QUANTILE, intervals, ratio_log_sd
from hp_tool.domain.result import Estimate
from hp_tool.errors import InputError
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate, recommend
from hp_tool.questions.training.problem import resolve_training

H100: dict[str, Any] = {"gpu": "h100-sxm-80gb", "num_gpus": 8}
DENSE: dict[str, Any] = {
    "model": "llama-3-8b",
    "training": {
        "sequence_length": 2048,
        "global_batch_size": 16,
        "cuda_graphs": False,
        "framework_version": "25.04",
    },
}
"""A family, GPU, release and precision of measured runs."""
EXPERTS = {
    "model": "qwen3-30b-a3b",
    "training": DENSE["training"] | {"framework_version": "26.04", "precision": "fp8"},
}


def unsaid(query: dict[str, Any]) -> dict[str, Any]:
    """The query without its release."""
    return query | {
        "training": {
            name: value for name, value in query["training"].items() if name != "framework_version"
        }
    }


def found(
    cluster: dict[str, Any] = H100, parallel: dict[str, Any] | None = None, **query: Any
) -> Estimate:
    asked = {"kind": "training", "cluster": cluster, "parallel": parallel or {}} | query
    return estimate(query=parse_query(asked), with_fixes=False)


def time_sd(of: Estimate) -> float:
    """Standard deviation of log step time that the interval states."""
    assert of.intervals and of.time
    low, high = of.intervals.step_s
    assert math.isclose(math.log(high / of.time.step_s), math.log(of.time.step_s / low))
    return math.log(high / low) / 2 / NORMAL_QUANTILE


def adding(*deviations: float | None) -> Any:
    """The standard deviation of what adds in variance."""
    return pytest.approx(math.hypot(*(sd or 0.0 for sd in deviations)))


def test_each_kind_of_model_has_the_scatter_of_its_kind() -> None:
    constants = efficiency_profile(gpu=gpu(H100["gpu"]), framework="megatron-core").framework
    assert time_sd(found(**DENSE)) == pytest.approx(constants.time_log_sd)
    earlier = EXPERTS | {"training": EXPERTS["training"] | {"framework_version": "25.09"}}
    own, experts = constants.time_log_sd, constants.expert_time_log_sd
    assert experts and constants.earlier_expert_time_log_sd
    assert time_sd(found(**EXPERTS)) == adding(own, experts)
    for query in (earlier, unsaid(EXPERTS)):
        assert time_sd(found(**query)) == adding(own, experts, constants.earlier_expert_time_log_sd)


DIFFERENT: dict[str, dict[str, Any]] = {
    "gpu": {"cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8}},
    "release": {"training": DENSE["training"] | {"framework_version": "25.07"}},
    "family": {"model": "qwen2.5-7b"},
    "model_kind": {"model": "t5-3b"},
    "precision": {
        "training": DENSE["training"] | {"precision": "fp32"},
    },
    "scale": {"cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16384}},
    "trainer": {
        "training": {"sequence_length": 2048, "global_batch_size": 16, "framework": "verl"}
    },
}
"""What each dimension adds to the question of DENSE."""


@pytest.mark.parametrize("name", DIFFERENT)
def test_each_difference_from_measured_runs_has_its_class_and_width(name: str) -> None:
    own = efficiency_profile(gpu=gpu(H100["gpu"]), framework="megatron-core").framework.time_log_sd
    asked = DENSE | DIFFERENT[name]
    if name == "scale":
        asked = asked | {"training": DENSE["training"] | {"global_batch_size": 16384}}
    other = found(**asked)
    assert other.familiarity and other.familiarity.class_ == name
    assert other.familiarity.nearest and other.familiarity.n > 0
    assert time_sd(other) == adding(own, prediction_doubts().extras[name])


def test_a_die_without_timed_kernels_has_a_doubt_of_its_own() -> None:
    known = prediction_doubts()
    own = efficiency_profile(gpu=gpu("a10g-24gb"), framework="megatron-core").framework.time_log_sd
    unmeasured = found(cluster={"gpu": "a10g-24gb", "num_gpus": 8}, **DENSE)
    assert unmeasured.familiarity and unmeasured.familiarity.class_ == "die"
    assert time_sd(unmeasured) == adding(
        own, known.card_log_sd, known.silicon_log_sd, known.kernels_log_sd
    )


def test_adapters_scatter_as_runs_with_adapters_did() -> None:
    lora = {"task": "lora", "lora": {"rank": 8, "target_modules": ["q_proj"]}}
    fp8 = {"training": unsaid(DENSE)["training"] | {"precision": "fp8"}}
    plain = found(**DENSE | fp8)
    tuned = found(**DENSE | {"model": "llama-2-70b", "training": fp8["training"] | lora})
    assert tuned.familiarity and tuned.familiarity.class_ == "familiar"
    assert time_sd(tuned) == adding(time_sd(plain), prediction_doubts().lora_log_sd)


@pytest.mark.parametrize("lora", [None, {"rank": 8, "target_modules": ["q_proj"]}])
def test_a_dense_model_may_run_under_any_release_if_none_is_named(
    lora: dict[str, Any] | None,
) -> None:
    training = DENSE["training"] | ({} if lora is None else {"task": "lora", "lora": lora})
    query = DENSE | {"training": training}
    if lora is not None:  # runs with adapters that name no release
        query |= {"model": "llama-2-70b", "training": training | {"precision": "fp8"}}
    assert prediction_doubts().unsaid_release_log_sd > 0.0
    assert time_sd(found(**unsaid(query))) == adding(
        time_sd(found(**query)), prediction_doubts().unsaid_release_log_sd
    )


@pytest.mark.parametrize("framework", ["torch-fsdp", "megatron-deepspeed"])
def test_a_framework_without_known_releases_takes_none(framework: str) -> None:
    query = DENSE | {"training": DENSE["training"] | {"framework": framework}}
    with pytest.raises(InputError, match=rf"do not depend on the release of {framework}; remove"):
        found(**query)
    assert time_sd(found(**unsaid(query))) > 0.0


@pytest.mark.parametrize("framework", ["torch-fsdp", "internevo"])
def test_pipelines_of_frameworks_that_were_timed_without_are_unmeasured(framework: str) -> None:
    query = DENSE | {
        "training": DENSE["training"] | {"framework": framework, "framework_version": None}
    }
    plain, piped = (found(**query | {"parallel": {"pipeline_parallel_size": p}}) for p in (1, 2))
    assert plain.familiarity and plain.familiarity.unmeasured == ()
    assert piped.familiarity
    assert piped.familiarity.unmeasured == ("parallel.pipeline_parallel_size",)
    assert time_sd(piped) == adding(time_sd(plain), prediction_doubts().feature_log_sd)


def test_memory_may_be_further_above_than_below() -> None:
    constants = efficiency_profile(gpu=gpu(H100["gpu"]), framework="megatron-core").framework
    one = found(**DENSE)
    assert one.intervals and one.memory
    low, high = one.intervals.memory_total_bytes
    total = one.memory.total_bytes
    assert math.log(total / low) == pytest.approx(NORMAL_QUANTILE * constants.memory_log_sd)
    assert math.log(high / total) == pytest.approx(NORMAL_QUANTILE * constants.memory_log_sd)
    assert one.intervals.memory_reserved_bytes
    least, most = one.intervals.memory_reserved_bytes
    assert least == low and math.log(most / total) == pytest.approx(
        NORMAL_QUANTILE * (constants.reserved_log_sd or 0)
    )


UNMEASURED: dict[str, dict[str, Any]] = {
    "training.offload: optimizer": {"training": DENSE["training"] | {"offload": "optimizer"}},
    "training.optimizer: muon": {"training": DENSE["training"] | {"optimizer": "muon"}},
    "parallel.pipeline_schedule": {
        "parallel": {"pipeline_parallel_size": 2, "pipeline_schedule": "zb-h1"}
    },
    "parallel.data_parallel_shard_size": {"parallel": {"data_parallel_shard_size": 4}},
    "parallel.recompute.modules": {
        "parallel": {"recompute": {"granularity": "selective", "modules": ["mlp"]}}
    },
    "parallel.context_parallel_communication": {
        "parallel": {"context_parallel_size": 2, "context_parallel_communication": "all_gather"}
    },
}


@pytest.mark.parametrize("name", UNMEASURED)
def test_what_nobody_measured_is_named_and_widens(name: str) -> None:
    plain, used = found(**DENSE), found(**DENSE | UNMEASURED[name])
    assert plain.familiarity and plain.familiarity.unmeasured == ()
    assert used.familiarity and used.familiarity.unmeasured == (name,)
    assert (plain.familiarity.class_, used.familiarity.class_) == ("familiar", "layout")
    assert time_sd(used) == adding(time_sd(plain), prediction_doubts().feature_log_sd)
    assert used.intervals and plain.intervals and used.memory and plain.memory
    low, usual = (
        one.intervals.memory_total_bytes[0] / one.memory.total_bytes for one in (used, plain)
    )  # type: ignore[union-attr]
    assert low < usual


def test_the_ratio_of_two_configurations_is_better_known_than_either() -> None:
    for framework in ("megatron-core", "torch-fsdp", "nanotron"):
        profile = efficiency_profile(gpu=gpu("h100-sxm-80gb"), framework=framework)
        pair = profile.framework.pair_log_sd
        assert (
            pair and ratio_log_sd(profile) == pair < math.sqrt(2.0) * profile.framework.time_log_sd
        )
        assert ratio_log_sd(profile, differing=1) == adding(
            pair, prediction_doubts().feature_log_sd
        )
    alone = efficiency_profile(gpu=gpu("cpu"), framework="megatron-core")
    assert ratio_log_sd(alone) == adding(alone.framework.time_log_sd, alone.framework.time_log_sd)


def test_layouts_of_experts_and_of_adapters_are_no_easier_to_tell_apart() -> None:
    lora = DENSE | {"training": DENSE["training"] | {"task": "lora", "lora": {"rank": 16}}}
    queries = (
        parse_query({"kind": "training", "cluster": H100} | query)
        for query in (DENSE, EXPERTS, lora)
    )
    dense, experts, adapters = (resolve_training(query).profile for query in queries)
    assert ratio_log_sd(experts) == experts.framework.expert_pair_log_sd >= ratio_log_sd(dense)
    assert ratio_log_sd(adapters) == adding(
        float(ratio_log_sd(dense)), prediction_doubts().lora_pair_log_sd
    )


def test_rows_of_a_group_cannot_be_told_apart() -> None:
    query = {
        "kind": "training",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
        "model": "llama-3-8b",
        "training": {"sequence_length": 4096, "global_batch_size": 256},
        "rank_by": "mean",
        "parallel": {
            "zero_stage": 1,
            "data_parallel_shard_size": 0,
            "context_parallel_size": 1,
            "recompute": ["none", "full"],
        },
    }
    rows = recommend(query=parse_query(query), top=60).recommendations
    bound = NORMAL_QUANTILE * ratio_log_sd(
        efficiency_profile(gpu=gpu("h100-sxm-80gb"), framework="megatron-core")
    )
    first = {}
    for row in rows:
        assert (
            row.group is not None
            and row.estimate.time is not None
            and row.estimate.familiarity is not None
            and row.estimate.familiarity.unmeasured == ()
        )
        first[row.group] = min(row.estimate.time.step_s, first.get(row.group, math.inf))
    for row in rows:
        assert row.group is not None and row.estimate.time is not None
        assert math.log(row.estimate.time.step_s / first[row.group]) <= bound
    groups = [row.group for row in rows]
    assert groups == sorted(groups) and groups[0] == 1 and groups[-1] > 1
    starts = list(first.values())
    assert all(math.log(later / earlier) > bound for earlier, later in itertools.pairwise(starts))


def test_each_of_several_features_counts() -> None:
    two = UNMEASURED["training.optimizer: muon"] | UNMEASURED["parallel.data_parallel_shard_size"]
    plain, both = found(**DENSE), found(**DENSE | two)
    assert time_sd(both) == adding(
        time_sd(plain), prediction_doubts().feature_log_sd, prediction_doubts().feature_log_sd
    )


def test_experts_that_no_row_speaks_for_are_another_kind_of_model() -> None:
    query = EXPERTS | {"training": unsaid(EXPERTS)["training"] | {"framework": "torch-fsdp"}}
    asked = found(cluster={"gpu": "h100-sxm-80gb", "num_gpus": 8}, **query)
    assert asked.familiarity and asked.familiarity.class_ == "model_kind"


def test_recommendations_say_it_too() -> None:
    query = parse_query(
        {"kind": "training", "cluster": H100} | DENSE | UNMEASURED["training.optimizer: muon"]
    )
    best = recommend(query=query, top=1).recommendations[0].estimate
    assert best.familiarity and best.familiarity.unmeasured == ("training.optimizer: muon",)


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_an_allocator_that_may_retry_scatters_like_a_coin(chance: float) -> None:
    case = resolve_training(parse_query({"kind": "training", "cluster": H100} | DENSE))

    def sd(**retrying: float) -> float:
        low, high = intervals(
            step_s=1.0, memory_total_bytes=1e9, case=case, unmeasured=(), **retrying
        ).step_s
        return math.log(high / low) / 2 / NORMAL_QUANTILE

    assert sd(retries=chance, slowdown=5.0) == adding(
        sd(), math.sqrt(chance * (1.0 - chance)) * math.log(5.0)
    )
