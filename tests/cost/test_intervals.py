"""Intervals are as wide as held-out rows scatter, and wider where nobody looked."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import doubts, efficiency
from hp_tool.cost.uncertainty import NORMAL_QUANTILE, intervals, ratio_log_sd
from hp_tool.domain.result import Estimate
from hp_tool.errors import InputError
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate, recommend
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.releases import release_variance

H100: dict[str, Any] = {"gpu": "h100-sxm-80gb", "num_gpus": 8}
DENSE: dict[str, Any] = {
    "model": "gpt3-1.3b",
    "training": {
        "sequence_length": 2048,
        "global_batch_size": 16,
        "cuda_graphs": False,
        "framework_version": "26.04",
    },
}
EXPERTS = DENSE | {"model": "qwen3-30b-a3b"}


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
    constants = efficiency(gpu=gpu(H100["gpu"]), framework="megatron-core").framework
    assert time_sd(found(**DENSE)) == pytest.approx(constants.time_log_sd)
    earlier = EXPERTS | {"training": EXPERTS["training"] | {"framework_version": "25.09"}}
    own, experts = constants.time_log_sd, constants.expert_time_log_sd
    assert experts and constants.earlier_expert_time_log_sd
    assert time_sd(found(**EXPERTS)) == adding(own, experts)
    for query in (earlier, unsaid(EXPERTS)):
        assert time_sd(found(**query)) == adding(own, experts, constants.earlier_expert_time_log_sd)


def test_what_the_measured_runs_do_not_tell_adds_in_variance() -> None:
    known = doubts()
    own = efficiency(gpu=gpu(H100["gpu"]), framework="megatron-core").framework.time_log_sd
    assert min(known.silicon_log_sd, known.kernels_log_sd, known.lora_log_sd) > 0.0
    assert min(known.card_log_sd, known.release_log_sd) >= 0.0, (
        "may scatter no more than the framework's own runs"
    )
    assert time_sd(found(cluster={"gpu": "h200-sxm-141gb", "num_gpus": 8}, **DENSE)) == adding(
        own, known.card_log_sd
    )
    unmeasured = adding(own, known.card_log_sd, known.silicon_log_sd, known.kernels_log_sd)
    assert time_sd(found(cluster={"gpu": "l40s-48gb", "num_gpus": 8}, **DENSE)) == unmeasured
    lora = {
        "training": DENSE["training"]
        | {"task": "lora", "lora": {"rank": 8, "target_modules": ["q_proj"]}}
    }
    assert time_sd(found(**DENSE | lora)) == adding(own, known.lora_log_sd)
    profile = efficiency(gpu=gpu(H100["gpu"]), framework="megatron-core")
    assert (
        release_variance(profile, experts=False, gpu=gpu(H100["gpu"]), release="29.01")
        == known.release_log_sd**2
    )
    fsdp = {"training": unsaid(DENSE)["training"] | {"framework": "torch-fsdp"}}
    sharded = efficiency(gpu=gpu("b200-sxm-180gb"), framework="torch-fsdp").framework.time_log_sd
    on_b200 = found(cluster={"gpu": "b200-sxm-180gb", "num_gpus": 8}, **DENSE | fsdp)
    assert time_sd(on_b200) == adding(sharded, known.card_log_sd, known.silicon_log_sd), (
        "another framework's runs do not tell"
    )


@pytest.mark.parametrize("lora", [None, {"rank": 8, "target_modules": ["q_proj"]}])
def test_a_dense_model_may_run_under_any_release_if_none_is_named(
    lora: dict[str, Any] | None,
) -> None:
    training = DENSE["training"] | ({} if lora is None else {"task": "lora", "lora": lora})
    query = DENSE | {"training": training}
    assert doubts().unsaid_release_log_sd > 0.0
    assert time_sd(found(**unsaid(query))) == adding(
        time_sd(found(**query)), doubts().unsaid_release_log_sd
    )


@pytest.mark.parametrize("framework", ["torch-fsdp", "megatron-deepspeed"])
def test_a_framework_without_known_releases_takes_none(framework: str) -> None:
    query = DENSE | {"training": DENSE["training"] | {"framework": framework}}
    with pytest.raises(InputError, match=rf"no release of {framework} is known .*; leave"):
        found(**query)
    assert time_sd(found(**unsaid(query))) > 0.0


def test_software_of_2022_may_have_changed_since() -> None:
    a100 = {"gpu": "a100-sxm-80gb", "num_gpus": 8}
    own = efficiency(gpu=gpu(a100["gpu"]), framework="megatron-core").framework.time_log_sd  # type: ignore[arg-type]
    assert time_sd(found(cluster=a100, **DENSE)) == adding(own, doubts().release_log_sd)
    then = {"training": DENSE["training"] | {"framework_version": "22.05"}}
    assert time_sd(found(cluster=a100, **DENSE | then)) == adding(own)


@pytest.mark.parametrize("framework", ["torch-fsdp", "internevo"])
def test_pipelines_of_frameworks_that_were_timed_without_are_unchecked(framework: str) -> None:
    query = DENSE | {
        "training": DENSE["training"] | {"framework": framework, "framework_version": None}
    }
    plain, piped = (found(**query | {"parallel": {"pipeline_parallel_size": p}}) for p in (1, 2))
    assert "unchecked" not in plain.provenance
    assert piped.provenance["unchecked"] == ["parallel.pipeline_parallel_size"]
    assert time_sd(piped) == adding(time_sd(plain), doubts().feature_log_sd)


def test_memory_may_be_further_above_than_below() -> None:
    constants = efficiency(gpu=gpu(H100["gpu"]), framework="megatron-core").framework
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


UNCHECKED: dict[str, dict[str, Any]] = {
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
    "model.architecture: encoder_decoder": {"model": "t5-3b"},
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_what_nobody_measured_is_named_and_widens(name: str) -> None:
    plain, used = found(**DENSE), found(**DENSE | UNCHECKED[name])
    assert "unchecked" not in plain.provenance
    assert used.provenance["unchecked"] == [name]
    assert time_sd(used) == adding(time_sd(plain), doubts().feature_log_sd)
    assert used.intervals and plain.intervals and used.memory and plain.memory
    low, usual = (
        one.intervals.memory_total_bytes[0] / one.memory.total_bytes for one in (used, plain)
    )  # type: ignore[union-attr]
    assert low < usual


def test_the_ratio_of_two_configurations_is_better_known_than_either() -> None:
    for framework in ("megatron-core", "torch-fsdp", "nanotron"):
        profile = efficiency(gpu=gpu("h100-sxm-80gb"), framework=framework)
        pair = profile.framework.pair_log_sd
        assert (
            pair and ratio_log_sd(profile) == pair < math.sqrt(2.0) * profile.framework.time_log_sd
        )
        assert ratio_log_sd(profile, differing=1) == adding(pair, doubts().feature_log_sd)
    alone = efficiency(gpu=gpu("cpu"), framework="megatron-core")
    assert ratio_log_sd(alone) == adding(alone.framework.time_log_sd, alone.framework.time_log_sd)


def test_layouts_of_experts_and_of_adapters_are_no_easier_to_tell_apart() -> None:
    lora = DENSE | {"training": DENSE["training"] | {"task": "lora", "lora": {"rank": 16}}}
    queries = (
        parse_query({"kind": "training", "cluster": H100} | query)
        for query in (DENSE, EXPERTS, lora)
    )
    dense, experts, adapters = (resolve_training(query).profile for query in queries)
    assert ratio_log_sd(experts) == experts.framework.expert_pair_log_sd >= ratio_log_sd(dense)
    assert ratio_log_sd(adapters) == adding(float(ratio_log_sd(dense)), doubts().lora_pair_log_sd)


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
        efficiency(gpu=gpu("h100-sxm-80gb"), framework="megatron-core")
    )
    first = {}
    for row in rows:
        assert (
            row.group is not None
            and row.estimate.time is not None
            and "unchecked" not in row.estimate.provenance
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
    two = UNCHECKED["training.optimizer: muon"] | UNCHECKED["parallel.data_parallel_shard_size"]
    plain, both = found(**DENSE), found(**DENSE | two)
    assert time_sd(both) == adding(time_sd(plain), doubts().feature_log_sd, doubts().feature_log_sd)


def test_experts_that_no_row_speaks_for_are_unchecked() -> None:
    query = EXPERTS | {"training": unsaid(EXPERTS)["training"] | {"framework": "torch-fsdp"}}
    assert found(cluster={"gpu": "h200-sxm-141gb", "num_gpus": 16}, **query).provenance[
        "unchecked"
    ] == ["model.num_experts"]


def test_recommendations_say_it_too() -> None:
    query = parse_query(
        {"kind": "training", "cluster": H100} | DENSE | UNCHECKED["training.optimizer: muon"]
    )
    assert recommend(query=query, top=1).recommendations[0].estimate.provenance["unchecked"] == [
        "training.optimizer: muon"
    ]


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_an_allocator_that_may_retry_scatters_like_a_coin(chance: float) -> None:
    case = resolve_training(parse_query({"kind": "training", "cluster": H100} | DENSE))

    def sd(**retrying: float) -> float:
        low, high = intervals(
            step_s=1.0, memory_total_bytes=1e9, case=case, unchecked=(), **retrying
        ).step_s
        return math.log(high / low) / 2 / NORMAL_QUANTILE

    assert sd(retries=chance, slowdown=5.0) == adding(
        sd(), math.sqrt(chance * (1.0 - chance)) * math.log(5.0)
    )
