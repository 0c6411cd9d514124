"""What is told to fix a configuration does, changes what it says and nothing else, and costs what
it says.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.domain.parallel import ParallelConfig, Recompute
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Fix
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import config_query, estimate
from hp_tool.questions.training.fixes import GROWTH, MAX_FIXES, MAX_STEP_RATIO

BASE: dict[str, Any] = {
    "kind": "training",
    "model": "gpt3-175b",  # 96 heads, 96 layers
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 1024},
    "training": {"sequence_length": 2048, "global_batch_size": 1536, "total_tokens": 300e9},
    "parallel": {
        "tensor_parallel_size": 8,
        "pipeline_parallel_size": 8,
        "virtual_pipeline_parallel_size": 3,
        "recompute": "selective",
    },
}
MIXTRAL: dict[str, Any] = {
    "model": "mixtral-8x7b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"sequence_length": 8192, "global_batch_size": 128},
}


OFFLOAD = "training.offload"
LLAMA: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "training": {"sequence_length": 8192, "global_batch_size": 128},
    "parallel": {"tensor_parallel_size": 8, "micro_batch_size": 1, "recompute": "full"},
}
SPLIT = {"tensor_parallel_size": 8, "micro_batch_size": 1}
TWO_NODES = {"gpu": "h100-sxm-80gb", "num_gpus": 16}
TRL: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "rtx-4090-24gb", "num_gpus": 1},
    "training": {
        "sequence_length": 2048,
        "global_batch_size": 16,
        "task": "lora",
        "lora": {"rank": 16},
        "framework": "hf-trainer",
        "recipe": "trl-1.7",
    },
}


def query(
    *,
    constraints: Any = None,
    training: Any = None,
    cluster: Any = None,
    model: Any = None,
    **parallel: Any,
) -> Query:
    return parse_query(
        {
            "kind": "training",
            "model": model or BASE["model"],
            "cluster": BASE["cluster"] | (cluster or {}),
            "training": BASE["training"] | (training or {}),
            "constraints": constraints or {},
            "parallel": BASE["parallel"] | parallel,
        }
    )


def days(**change: Any) -> float:
    """Of the training without a deadline."""
    found = estimate(query=query(**change)).days
    assert found is not None
    return found


def with_fix(asked: Query, fix: Fix) -> Query:
    """The query with the fix taken over, as its text asks it."""
    return parse_query(Configuration.from_row(fix, query=asked).text())


def check(asked: Query) -> Estimate:
    """All that is promised of the fixes of any configuration."""
    found = estimate(query=asked)
    if found.feasible:
        assert found.fixes == ()
        return found
    assert len(found.fixes) <= MAX_FIXES
    same = [fix for fix in found.fixes if not fix.set]
    narrower = [fix for fix in found.fixes if any(path.startswith("training.") for path in fix.set)]
    assert list(found.fixes[: len(same) + len(narrower)]) == same + narrower
    offloaded = [fix for fix in narrower if OFFLOAD in fix.set]
    with_layout = [fix for fix in narrower if fix.changed]
    assert len(offloaded) <= 1 and len(with_layout) <= 1
    assert len(narrower) - len(offloaded) - len(with_layout) <= 1
    assert not with_layout or all(fix.remaining for fix in same)
    assert len(found.fixes) - len(same) - len(narrower) <= 1
    assert [fix.step_s for fix in same] == sorted(fix.step_s for fix in same)
    for fix in found.fixes:
        check_one(asked, found, fix)
    return found


def check_one(asked: Query, found: Estimate, fix: Fix) -> None:
    after = estimate(query=with_fix(asked, fix))
    assert after.memory is not None and after.time is not None and found.parallel is not None
    assert after.memory.total_bytes <= after.memory.capacity_bytes
    assert after.feasible == (not fix.remaining)
    assert after.parallel == fix.parallel
    assert fix.memory_total_bytes == pytest.approx(after.memory.total_bytes, rel=1e-9)
    assert fix.step_s == pytest.approx(after.time.step_s, rel=1e-9)
    for of_fix, of_answer in ((fix.days, after.days), (fix.cost, after.cost)):
        assert of_fix == (None if of_answer is None else pytest.approx(of_answer, rel=1e-9))
    differing = {
        n
        for n in ParallelConfig.__slots__
        if getattr(found.parallel, n) != getattr(fix.parallel, n)
    }
    assert set(fix.changed) == differing - {"pipeline_layout"}  # which follows from the sizes
    if found.memory is None or found.time is None:
        assert fix.memory_saved_bytes is None and fix.step_change_fraction is None
        return
    assert fix.memory_saved_bytes == pytest.approx(
        found.memory.total_bytes - after.memory.total_bytes, abs=1e3
    )
    assert fix.step_change_fraction == pytest.approx(
        after.time.step_s / found.time.step_s - 1.0, abs=1e-9
    )


CASES = {
    "too large": {"tensor_parallel_size": 2},
    "far too large": {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 1,
        "virtual_pipeline_parallel_size": 1,
    },
    "no divisor": {"tensor_parallel_size": 3},
    "three axes wrong": {
        "tensor_parallel_size": 7,
        "pipeline_parallel_size": 5,
        "micro_batch_size": 7,
    },
    "replicas wrong": {"data_parallel_size": 8},
    "too few devices": {"cluster": {"num_gpus": 32}},
    "too slow": {"recompute": "full", "share_of_days": 0.95},
    "hopelessly slow": {"constraints": {"max_days": 0.1}},
    "too slow and too large": {"tensor_parallel_size": 2, "share_of_days": 0.95},
    "interleaved only": {"pipeline_schedule": "interleaved", "tensor_parallel_size": 2},
    "plain 1F1B only": {
        "pipeline_schedule": "1f1b",
        "tensor_parallel_size": 2,
        "virtual_pipeline_parallel_size": 1,
    },
    "not one expert": {"expert_parallel_size": 4},
    "mixture": MIXTRAL
    | {"pipeline_parallel_size": 1, "tensor_parallel_size": 1, "virtual_pipeline_parallel_size": 1},
}


@pytest.mark.parametrize("change", CASES.values(), ids=CASES)
def test_fixes_do_what_they_say(change: dict[str, Any]) -> None:
    change = dict(change)
    if share := change.pop("share_of_days", None):
        change["constraints"] = {"max_days": share * days(**change)}
    assert not check(query(**change)).feasible


def test_a_budget_is_met_by_what_is_told() -> None:
    found = estimate(query=query(recompute="full"))
    assert found.cost is not None
    limit = 0.9 * found.cost
    fixes = check(query(recompute="full", constraints={"max_cost": limit})).fixes
    assert fixes and all(fix.cost is not None and fix.cost <= limit for fix in fixes)


sizes = st.sampled_from((1, 2, 3, 4, 6, 8, 16))


@given(
    t=sizes,
    p=sizes,
    v=st.sampled_from((1, 2, 3, 5)),
    b=st.sampled_from((1, 2, 5, 8)),
    sp=st.booleans(),
    zero=st.integers(0, 3),
    recompute=st.sampled_from(
        ("none", "selective", "full", Recompute(granularity="full", method="block", num_layers=2))
    ),
    max_days=st.sampled_from((None, 0.5, 20.0, 60.0)),
    model=st.sampled_from(("gpt3-175b", "llama-2-70b", "gpt-22b")),
)
def test_every_mend_of_any_configuration(
    t: int,
    p: int,
    v: int,
    b: int,
    sp: bool,
    zero: int,
    recompute: Any,
    max_days: float | None,
    model: str,
) -> None:
    asked = query(model=model, constraints={"max_days": max_days})
    parallel = replace(
        asked.parallel,
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        virtual_pipeline_parallel_size=v,
        micro_batch_size=b,
        sequence_parallel=sp,
        recompute=recompute,
        zero_stage=zero,
    )
    check(replace(asked, parallel=parallel))


@pytest.mark.parametrize(
    ("training", "change"),
    [
        ({}, {"gradient_precision": "bf16"}),
        ({"task": "lora", "lora": {"rank": 16}}, {"frozen_precision": "fp8"}),
        (
            {
                "task": "lora",
                "lora": {"rank": 16},
                "frozen_precision": "fp8",
                "activation_func_fp8_input_store": False,
            },
            {"frozen_precision": "nf4"},
        ),
    ],
)
def test_what_keeps_the_layout_is_told_too(
    training: dict[str, Any], change: dict[str, str]
) -> None:
    """With a little less room than the configuration takes."""
    asked = query(training=training)
    memory = estimate(query=asked, with_fixes=False).memory
    assert memory is not None
    headroom = 1.0 - 0.95 * 0.99 * memory.total_bytes / memory.capacity_bytes
    found = check(query(training=training, constraints={"memory_headroom_fraction": headroom}))
    (fix,) = [
        fix
        for fix in found.fixes
        if any(path.startswith("training.") and path != OFFLOAD for path in fix.set)
    ]
    ((key, value),) = change.items()
    assert (
        fix.set == {f"training.{key}": value}
        and fix.changed == ()
        and fix.change.endswith(f"-> {value}")
        and key in fix.change
    )


def test_offload_of_the_optimizer_is_told_unless_the_query_sets_offload() -> None:
    offloaded, _ = check(parse_query(LLAMA)).fixes
    assert offloaded.set == {OFFLOAD: "optimizer"} and offloaded.changed == ()
    assert offloaded.change == "offload none -> optimizer"
    assert offloaded.num_gpus == 8
    kept = parse_query(LLAMA | {"training": LLAMA["training"] | {"offload": "none"}})
    assert all(OFFLOAD not in fix.set for fix in check(kept).fixes)


def test_a_base_in_fp32_is_mended_by_16_bits_and_recomputation_or_by_nf4() -> None:
    both, frozen, *more = check(parse_query(TRL)).fixes
    assert both.set == {"training.parameter_precision": "bf16"}
    assert both.changed == ("recompute",) and both.fit == "fits"
    assert both.change == "parameter_precision fp32 -> bf16, recompute none -> full"
    assert frozen.set == {"training.frozen_precision": "nf4"}, "TRL has no fp8"
    assert all(fix.num_gpus > 1 for fix in more)


def test_tensor_parallelism_leaves_no_node_where_a_pipeline_is_faster() -> None:
    training = {"sequence_length": 4096, "global_batch_size": 128, "gradient_precision": "bf16"}
    narrow = {"training": training}
    *_, more = check(parse_query(LLAMA | narrow | {"parallel": SPLIT})).fixes
    assert more.num_gpus == 16
    assert more.parallel.tensor_parallel_size == 8 and more.parallel.pipeline_parallel_size == 2
    wide = SPLIT | {"tensor_parallel_size": 16}
    across = estimate(
        query=parse_query(LLAMA | narrow | {"cluster": TWO_NODES, "parallel": wide}),
        with_fixes=False,
    )
    assert across.feasible and across.time is not None, "one change of the axes is enough"
    assert more.step_s < across.time.step_s


def test_one_precision_is_told_alone_where_it_is_enough() -> None:
    found = estimate(query=parse_query(TRL | {"parallel": {"recompute": "full"}})).fixes
    sets = [dict(fix.set) for fix in found if fix.num_gpus == 1]
    assert sets == [{"training.parameter_precision": "bf16"}]


def test_the_same_question_has_the_same_answer() -> None:
    asked = query(tensor_parallel_size=2)
    assert estimate(query=asked).fixes == estimate(query=asked).fixes != ()


def axes(fix: Fix) -> tuple[str, ...]:
    return tuple(name for name in fix.changed if name != "data_parallel_size")


def test_one_change_is_told_where_one_is_enough() -> None:
    found = estimate(query=query(tensor_parallel_size=2))
    changed = [len(axes(fix)) for fix in found.fixes if OFFLOAD not in fix.set]
    assert changed == [1] * len(changed) and changed
    assert found.fixes[0].change == "TP 2 -> 4 (DP 64 -> 32)"
    assert len({fix.changed for fix in found.fixes[:-1]}) == len(found.fixes) - 1
    assert found.fixes[-1].change.startswith("more GPUs, 1024 -> 2048")


def test_where_no_single_change_mends_two_do_and_neither_is_idle() -> None:
    asked = query(
        model="gpt-1t",
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        virtual_pipeline_parallel_size=1,
        recompute="none",
    )
    fixes = [fix for fix in check(asked).fixes if fix.num_gpus == 1024]
    assert fixes
    for fix in fixes:
        assert len(axes(fix)) >= 2
        for name in axes(fix):  # undoing either leaves it infeasible
            undone = replace(
                config_query(fix.parallel),
                data_parallel_size=None,
                **{name: getattr(asked.parallel, name)},
            )
            assert not estimate(query=replace(asked, parallel=undone)).feasible


def test_a_second_change_is_told_beside_a_single_one_where_it_is_worth_it() -> None:
    asked = query(
        cluster={"num_gpus": 128},
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        virtual_pipeline_parallel_size=1,
        micro_batch_size=2,
        recompute="none",
    )
    fixes = [fix for fix in check(asked).fixes if fix.num_gpus == 128]
    single = [fix.step_s for fix in fixes if len(axes(fix)) == 1]
    double = [fix.step_s for fix in fixes if len(axes(fix)) == 2]
    assert single and double
    assert max(double) <= MAX_STEP_RATIO * min(single)


def test_block_recomputation_takes_the_fewest_layers_that_fit() -> None:
    plain = {"recompute": "none", "virtual_pipeline_parallel_size": 1}
    least, most = (
        estimate(query=query(**plain | {"recompute": name})).memory for name in ("full", "none")
    )
    assert least is not None and most is not None
    halfway = 0.5 * (least.total_bytes + most.total_bytes)
    headroom = 1.0 - 0.95 * halfway / most.capacity_bytes  # capacity_bytes leaves the usual 5% free
    asked = query(**plain, constraints={"memory_headroom_fraction": headroom})
    found = check(asked)
    (fix,) = [
        fix
        for fix in found.fixes
        if fix.changed == ("recompute",) and isinstance(fix.parallel.recompute, Recompute)
    ]
    recompute = fix.parallel.recompute
    assert (
        isinstance(recompute, Recompute)
        and recompute.num_layers is not None
        and recompute.num_layers > 1
    )
    fewer = replace(recompute, num_layers=recompute.num_layers - 1)
    assert not estimate(
        query=replace(asked, parallel=replace(asked.parallel, recompute=fewer))
    ).feasible


def test_illegal_is_mended_by_the_nearest_legal_values() -> None:
    assert [fix.change for fix in estimate(query=query(tensor_parallel_size=3)).fixes] == [
        "TP 3 -> 4 (DP 42 -> 32)"
    ]
    (first, *_) = estimate(query=query(data_parallel_size=8)).fixes
    assert first.change == "DP 8 -> 16" and first.changed == ("data_parallel_size",)


def test_devices_alone_mend_what_wants_more_than_there_are() -> None:
    fix = estimate(query=query(cluster={"num_gpus": 32})).fixes[-1]
    assert fix.num_gpus == 64 and fix.changed == () and fix.change == "more GPUs, 32 -> 64"


def test_a_deadline_out_of_reach_tells_the_best_and_the_gap() -> None:
    found = check(query(constraints={"max_days": 0.1}))
    (best,) = [fix for fix in found.fixes if fix.num_gpus == 1024]
    (gap,) = best.remaining
    assert found.days is not None and best.days is not None and best.days < found.days
    assert gap.code == "target_missed" and (gap.needed, gap.available) == (best.days, 0.1)


def test_a_deadline_within_reach_is_met_by_what_is_told() -> None:
    limit = 0.95 * days(recompute="full")
    found = check(query(recompute="full", constraints={"max_days": limit}))
    assert found.fixes[0].changed == ("recompute",) and found.fixes[0].step_change_fraction < 0.0  # type: ignore[operator]
    assert all(
        fix.days is not None and fix.days <= limit and fix.remaining == () for fix in found.fixes
    )
    assert found.fixes[-1].num_gpus == GROWTH[0] * 1024


def test_feasible_estimates_pay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise AssertionError("neighbours of a feasible configuration were looked at")

    monkeypatch.setattr("hp_tool.questions.training.evaluate.fixes", fail)
    assert estimate(query=query()).feasible
    assert estimate(query=query(tensor_parallel_size=2), with_fixes=False).fixes == ()


def test_models_of_many_divisors_stay_quick() -> None:
    asked = query(
        model={
            "num_hidden_layers": 5040,
            "hidden_size": 50400,
            "num_attention_heads": 5040,
            "head_dim": 10,
            "vocab_size": 1024,
        },
        cluster={"num_gpus": 1 << 16},
        training={"global_batch_size": 1 << 16, "total_tokens": None},
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        virtual_pipeline_parallel_size=1,
    )
    start = time.process_time()
    check(asked)
    assert time.process_time() - start < 5.0
