"""Illegal and too large are answers with a code and a fix in numbers, not errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hp_tool.cost.legality import REASONS
from hp_tool.domain.result import Estimate
from hp_tool.domain.units import format_gib
from hp_tool.errors import InputError, NotFoundError, UnsupportedError
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate

BASE: dict[str, Any] = {
    "kind": "training",
    "model": "gpt-22b",  # 64 heads, 48 layers, width 6144
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 64},
    "training": {"sequence_length": 2048, "global_batch_size": 64},
    "parallel": {"tensor_parallel_size": 8, "recompute": "full"},
}


def asked(
    *,
    model: Any = None,
    cluster: Any = None,
    training: Any = None,
    constraints: Any = None,
    **parallel: Any,
) -> Estimate:
    query = BASE | {
        "model": model or BASE["model"],
        "cluster": BASE["cluster"] | (cluster or {}),
        "training": BASE["training"] | (training or {}),
        "constraints": constraints or {},
        "parallel": BASE["parallel"] | parallel,
    }
    return estimate(query=parse_query(query))


WIDE = {"num_hidden_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 1024}
ILLEGAL = [
    # code, query, words its message must hold
    (
        "heads_not_divisible",
        {"tensor_parallel_size": 128, "cluster": {"num_gpus": 128}},
        ("128", "64", "choose one of"),
    ),
    (
        "hidden_not_divisible",
        {"model": WIDE | {"intermediate_size": 4100}},
        ("8", "4100", "common divisor"),
    ),
    (
        "layers_not_divisible",
        {"pipeline_parallel_size": 64},
        ("64", "48", "below 48", "[1, 2, 3, 4, 6, 8"),
    ),
    ("world_size_mismatch", {"pipeline_parallel_size": 3}, ("8 x pipeline 3", "64", "divides 64")),
    (
        "batch_not_divisible",
        {"micro_batch_size": 5},
        ("8 x micro_batch_size 5 = 40", "64", "change micro_batch_size"),
    ),
    (
        "sequence_not_divisible",
        {"training": {"sequence_length": 2044}},
        ("2044", "8 ways", "multiple of 8"),
    ),
    (
        "experts_not_divisible",
        {"expert_parallel_size": 2},
        ("2 x expert_tensor_parallel_size 1", "no experts"),
    ),
    (
        "interleaving_needs_pipeline",
        {"virtual_pipeline_parallel_size": 2},
        ("2", "at least 2, not 1"),
    ),
    (
        "micro_batches_not_divisible",
        {
            "pipeline_parallel_size": 4,
            "virtual_pipeline_parallel_size": 2,
            "training": {"global_batch_size": 60},
        },
        ("30", "multiple of pipeline_parallel_size 4", "virtual_pipeline_parallel_size to 1"),
    ),
    (
        "too_few_micro_batches",
        {
            "pipeline_parallel_size": 8,
            "micro_batch_size": 16,
            "training": {"framework": "nanotron"},
        },
        ("nanotron", "= 7 micro-batches, not 4", "smaller micro-batches"),
    ),
    (
        "mixer_not_divisible",
        {"model": "nemotron-3-nano-30b-a3b", "tensor_parallel_size": 16, "recompute": "none"},
        ("16", "8 groups"),
    ),
    (
        "shards_not_divisible",
        {"data_parallel_shard_size": 3},
        ("3", "data_parallel_size 8", "[1, 2, 4, 8]", "0 to shard over all"),
    ),
    (
        "encoder_decoder_not_split",
        {"model": "t5-11b", "context_parallel_size": 2},
        ("t5-11b", "context parallelism (here 2)", "both sizes to 1"),
    ),
    (
        "schedule_not_applicable",
        {
            "pipeline_parallel_size": 2,
            "pipeline_schedule": "dualpipe",
            "training": {"global_batch_size": 12},
        },
        ("dualpipe", "at least 2 pipeline_parallel_size", "micro-batches 3"),
    ),
    (
        "kinds_not_divisible",
        {
            "cluster": {
                "gpu": None,
                "num_gpus": None,
                "stages": [{"gpu": "a100-sxm-80gb", "num_gpus": n} for n in (16, 48)],
            }
        },
        ("16 x a100-sxm-80gb and 48", "multiple of 4"),
    ),
    (
        "context_heads_not_divisible",
        {"context_parallel_size": 16, "context_parallel_communication": "a2a"},
        ("16 context-parallel ranks", "8 query and 8 key/value heads", "communication p2p"),
    ),
    (
        "exchange_overlap_not_applicable",
        {
            "model": "mixtral-8x7b",
            "recompute": "none",
            "training": {"overlap": {"expert_parallel": True}},
        },
        ("expert_parallel_size above 1 (here 1)", "remove the overlap"),
    ),
    (
        "layout_not_applicable",
        {"pipeline_layout": "Et*24|t*24L", "pipeline_parallel_size": 4},
        ("2 model chunks", "(here 4)", "is 2"),
    ),
    (
        "dispatcher_not_applicable",
        {
            "model": "mixtral-8x7b",
            "expert_parallel_size": 8,
            "moe_token_dispatcher_type": "flex",
            "cluster": {"gpu": "l40s-48gb"},
        },
        ("flex", "l40s-48gb", "NVLink", "choose alltoall"),
    ),
    (
        "cuda_graphs_not_applicable",
        {
            "model": "mixtral-8x7b",
            "recompute": "full",
            "training": {"cuda_graphs": True, "framework_version": "0.16"},
        },
        ("attn, moe_router, moe_preprocess", "recompute to none", "cuda_graphs to false"),
    ),
]


@pytest.mark.parametrize(("code", "change", "words"), ILLEGAL, ids=[row[0] for row in ILLEGAL])
def test_each_rule_names_its_values_and_the_mend(
    code: str, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    result = asked(**change)
    assert not result.feasible
    assert result.memory is None and result.time is None
    reason = next(reason for reason in result.reasons if reason.code == code)
    for word in words:
        assert word in reason.message
    assert reason.needed is not None and reason.available is not None


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "legal"),
    [(16, 2, True), (16, 16, True), (48, 6, False), (48, 12, False)],
)
def test_fewer_key_value_heads_than_tensor_ranks_are_copied_where_ranks_divide_by_them(
    heads: int, key_value_heads: int, legal: bool
) -> None:
    """On 8 ranks: 2 heads are kept by 4 ranks each and 16 are dealt out; of 6 or 12 some ranks
    would hold more.
    """
    shape = WIDE | {
        "hidden_size": 3072,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
    }
    codes = {reason.code for reason in asked(model=shape).reasons}
    assert ("heads_not_divisible" in codes) == (not legal)


def test_every_reason_has_a_case_here() -> None:
    assert {row[0] for row in ILLEGAL} == set(REASONS)


def test_the_base_of_these_cases_is_legal_and_fits() -> None:
    result = asked()
    assert result.feasible and result.reasons == ()
    assert (
        result.parallel is not None
        and result.parallel.data_parallel_size == 8
        and result.parallel.sequence_parallel
    )


def test_several_broken_rules_are_all_told() -> None:
    codes = {reason.code for reason in asked(pipeline_parallel_size=49, micro_batch_size=7).reasons}
    assert {"layers_not_divisible", "world_size_mismatch", "batch_not_divisible"} <= codes


def test_a_given_data_parallel_size_is_checked() -> None:
    assert asked(data_parallel_size=8).feasible
    assert [reason.code for reason in asked(data_parallel_size=4).reasons] == [
        "world_size_mismatch"
    ]


def test_too_large_tells_how_much_of_what_and_still_gives_the_numbers() -> None:
    result = asked(model="gpt-1t", tensor_parallel_size=8, recompute="none")
    assert not result.feasible and result.memory is not None and result.time is not None
    (reason,) = result.reasons
    assert reason.code == "memory"
    assert (
        reason.needed
        == result.memory.total_bytes
        > result.memory.capacity_bytes
        == reason.available
    )
    assert reason.message.startswith(
        f"needs {format_gib(reason.needed)}, has {format_gib(reason.available)}: "
    )
    parts = [word.split()[0] for word in reason.message.partition(": ")[2].split(", ")]
    sizes = [getattr(result.memory, f"{part}_bytes") for part in parts]
    assert sizes == sorted(sizes, reverse=True)


def test_a_missed_deadline_is_a_reason_and_a_met_one_is_not() -> None:
    tokens = {"total_tokens": 300e9}
    days = asked(training=tokens).days
    assert days is not None
    assert asked(training=tokens, constraints={"max_days": days * 1.01}).feasible
    (reason,) = asked(training=tokens, constraints={"max_days": days / 2}).reasons
    assert reason.code == "target_missed" and reason.needed == days and reason.available == days / 2
    parts = [float(part.split()[-1]) for part in reason.message.rpartition(": ")[2].split(", ")]
    assert parts == sorted(parts, reverse=True) and sum(parts) == pytest.approx(
        days, rel=0.05
    )  # all but the small ones


def test_a_missed_budget_is_a_reason() -> None:
    given = {"training": {"total_tokens": 300e9}, "cluster": {"price_per_gpu_hour": 2.0}}
    result = asked(**given)
    assert result.cost is not None and result.gpu_hours is not None
    assert result.cost == pytest.approx(2.0 * result.gpu_hours)
    (reason,) = asked(**given, constraints={"max_cost": result.cost / 2}).reasons
    assert reason.code == "target_missed" and "2.0 times the maximum of $" in reason.message


@pytest.mark.parametrize(
    ("change", "kind", "field"),
    [
        ({"model": "gpt-23b"}, NotFoundError, "model"),
        (
            {"model": "t5-11b", "training": {"optimizer": "muon"}},
            UnsupportedError,
            "training.optimizer",
        ),
        (
            {"training": {"decoder_sequence_length": 128}},
            InputError,
            "training.decoder_sequence_length",
        ),
        ({"training": {"precision": "fp8"}}, InputError, "training.precision"),  # A100 has none
        ({"training": {"framework": "trlx"}}, UnsupportedError, "training.framework"),
        (
            {"training": {"framework": "torch-fsdp"}, "zero_stage": 1},
            InputError,
            "parallel.zero_stage",
        ),
        ({"training": {"packed": True}}, InputError, "training.sequence_lengths"),
        (
            {"training": {"sequence_lengths": "synthetic-wen-text"}},
            NotFoundError,
            "training.sequence_lengths",
        ),
        (
            {"hierarchical_context_parallel_sizes": [2, 2]},
            InputError,
            "parallel.hierarchical_context_parallel_sizes",
        ),
        (
            {
                "context_parallel_communication": "a2a+p2p",
                "hierarchical_context_parallel_sizes": [2, 2],
            },
            InputError,
            "parallel.hierarchical_context_parallel_sizes",
        ),
        ({"moe_token_dispatcher_type": "flex"}, InputError, "parallel.moe_token_dispatcher_type"),
        (
            {"data_parallel_shard_size": 4, "zero_stage": 0},
            InputError,
            "parallel.data_parallel_shard_size",
        ),
        ({"rank_order": "tp-dp"}, InputError, "parallel.rank_order"),
        (
            {"model": "mixtral-8x7b", "rank_order": "tp-pp-dp"},
            UnsupportedError,
            "parallel.rank_order",
        ),
        ({"pipeline_layout": "Et*24|t*23L"}, InputError, "parallel.pipeline_layout"),
        (
            {"pipeline_layout": "Et*24|t*24L", "training": {"offload": "activations"}},
            UnsupportedError,
            "parallel.pipeline_layout",
        ),
        ({"cluster": {"network_oversubscription": 2.0}}, InputError, "cluster.nodes_per_leaf"),
        ({"pipeline_schedule": ["1f1b", "zb-h1"]}, InputError, "parallel.pipeline_schedule"),
        (
            {"pipeline_schedule": "zbv", "virtual_pipeline_parallel_size": 1},
            InputError,
            "parallel.pipeline_schedule",
        ),
        ({"pipeline_schedule": "zb-h2"}, InputError, "parallel.pipeline_schedule"),
        ({"recompute": "per_op"}, UnsupportedError, "parallel.recompute"),
        (
            {"pipeline_schedule": "interleaved"},
            InputError,
            "parallel.pipeline_schedule",
        ),  # of one chunk a rank
        (
            {"recompute": {"granularity": "selective", "num_layers": 2}},
            InputError,
            "parallel.recompute.method",
        ),
        (
            {"recompute": {"granularity": "full", "modules": ["core_attn"]}},
            InputError,
            "parallel.recompute.modules",
        ),
        (
            {"training": {"expert_capacity_factor": -1.0}},
            InputError,
            "training.expert_capacity_factor",
        ),
        ({"training": {"expert_imbalance": 0.5}}, InputError, "training.expert_imbalance"),
        ({"tensor_parallel_size": [2, 4]}, InputError, "parallel.tensor_parallel_size"),
        ({"constraints": {"max_days": 3}}, InputError, "training.total_tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(
    change: dict[str, Any], kind: type[Exception], field: str
) -> None:
    with pytest.raises(kind) as caught:
        asked(**change)
    assert caught.value.field == field  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"objective": "ttft"}, InputError),
        ({"targets": {"ttft_s": 1.0}}, InputError),
        ({"inference": {"input_length": 1, "output_length": 1, "concurrency": 1}}, InputError),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else None,
)
def test_a_section_that_would_change_nothing_is_refused(
    change: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind) as caught:
        estimate(query=parse_query(BASE | change))
    assert caught.value.field == next(iter(change))  # type: ignore[attr-defined]


def test_headroom_decides_what_fits() -> None:
    roomy = asked(constraints={"memory_headroom_fraction": 0.0})
    assert roomy.feasible and roomy.memory is not None
    needed = roomy.memory.total_bytes / roomy.memory.capacity_bytes
    assert (
        asked(constraints={"memory_headroom_fraction": 1 - needed * 0.99}).reasons[0].code
        == "memory"
    )


def test_an_estimate_is_json_without_infinities() -> None:
    from hp_tool.questions.schema import to_dict

    found = to_dict(asked())
    assert set(found) == {field.name for field in dataclasses.fields(Estimate)}
    assert found["provenance"]["gpu"] == "a100-sxm-80gb"


def test_a_release_whose_constants_are_not_known_apart_is_told() -> None:
    plain, asked_for = asked(), asked(training={"framework_version": "0.12"})
    assert plain.time == asked_for.time and "framework_version" not in plain.provenance
    assert str(asked_for.provenance["framework_version"]).startswith("0.12: ")


@pytest.mark.parametrize(
    ("code", "change", "numbers"),
    [
        (  # 60 / 2 = 30 micro-batches, and 4 does not divide them
            "micro_batches_not_divisible",
            {
                "pipeline_parallel_size": 4,
                "virtual_pipeline_parallel_size": 2,
                "training": {"global_batch_size": 60},
            },
            (4, 30),
        ),
        (  # enough expert ranks, and no interleaving
            "exchange_overlap_not_applicable",
            {
                "model": "mixtral-8x7b",
                "tensor_parallel_size": 4,
                "pipeline_parallel_size": 2,
                "expert_parallel_size": 8,
                "recompute": "none",
                "training": {"overlap": {"expert_parallel": True}},
            },
            (2, 1),
        ),
    ],
)
def test_a_rule_counts_what_it_needs_and_what_there_is(
    code: str, change: dict[str, Any], numbers: tuple[int, int]
) -> None:
    reason = next(reason for reason in asked(**change).reasons if reason.code == code)
    assert (reason.needed, reason.available) == numbers
