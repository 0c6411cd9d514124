"""All-to-alls behind the opposite pass (training.overlap.expert_parallel)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hp_tool.cost.block import BlockTime
from hp_tool.cost.moe import overlap_with_other_pass
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload
from hp_tool.errors import InputError
from hp_tool.questions.training import estimate, recommend

INTERLEAVED: dict[str, Any] = {
    "pipeline_parallel_size": 4,
    "virtual_pipeline_parallel_size": 4,
    "expert_parallel_size": 8,
    "micro_batch_size": 1,
}


def asked(
    overlap: bool | None, *, model: str = "mixtral-8x7b", batch: int = 256, **parallel: Any
) -> Query:
    spec = None if overlap is None else OverlapSpec(expert_parallel=overlap)
    return Query(
        kind="training",
        model=model,
        cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=64, gpus_per_node=4),
        training=TrainingWorkload(sequence_length=4096, global_batch_size=batch, overlap=spec),
        parallel=ParallelQuery(**INTERLEAVED | parallel),
    )


def parts(query: Query) -> dict[str, float]:
    found = estimate(query=query).time
    assert found is not None
    return found.parts_s


def test_only_the_exchange_and_what_waits_for_it_get_shorter() -> None:
    plain, off, on = (parts(asked(overlap)) for overlap in (None, False, True))
    assert off == plain
    assert 0.0 <= on["expert_parallel"] < plain["expert_parallel"]
    assert on["pipeline_bubble"] < plain["pipeline_bubble"]
    for name in ("compute", "tensor_parallel", "optimizer", "pipeline_p2p"):
        assert on[name] == plain[name]


def test_of_few_micro_batches_fewer_have_an_opposite_pass() -> None:
    """16 replicas: m = 4 leaves 1 - (3 x 4 + 1) / 16 = 3/16 of the passes merged, m = 16 leaves
    51/64.
    """
    hidden = []
    for batch in (64, 256):
        plain, on = (
            parts(asked(overlap, batch=batch))["expert_parallel"] for overlap in (None, True)
        )
        hidden.append((plain - on) / plain)
    assert hidden[0] / hidden[1] == pytest.approx((3 / 16) / (51 / 64))


def test_what_outlasts_the_compute_stays_exposed() -> None:
    attention = BlockTime(
        matmul=1.0,
        weight_gradient=1.0,
        core=1.0,
        core_backward=2.0,
        elementwise=0.0,
        elementwise_backward=0.0,
    )
    experts = replace(
        attention,
        matmul=3.0,
        weight_gradient=3.0,
        core=0.0,
        core_backward=0.0,
        expert=14.0,
        expert_backward=8.0,
    )
    merged = overlap_with_other_pass(experts, attention=attention)
    # 7 a2a beside 4 of attention's backward, 7 beside 6 of the experts'; 4 beside 2 and 4 beside 3
    # of the forward passes. What is hidden takes its share of the arithmetic.
    taken = 20 / 132
    assert merged.expert == pytest.approx(3.0 + 1.0 + taken * (4.0 + 6.0))
    assert merged.expert_backward == pytest.approx(2.0 + 1.0 + taken * (2.0 + 3.0))


@pytest.mark.parametrize(
    "parallel",
    [
        {"virtual_pipeline_parallel_size": 1},
        {"expert_parallel_size": 1},
        {"pipeline_schedule": "gpipe"},
    ],
    ids=lambda said: next(iter(said)),
)
def test_what_megatron_core_refuses_is_illegal(parallel: dict[str, Any]) -> None:
    if "pipeline_schedule" in parallel:
        parallel = parallel | {"virtual_pipeline_parallel_size": 1}
    found = estimate(query=asked(True, **parallel), with_fixes=False)
    assert "exchange_overlap_not_applicable" in {reason.code for reason in found.reasons}


def test_full_recomputation_is_refused_and_never_recommended() -> None:
    with pytest.raises(InputError) as caught:
        estimate(query=asked(True, recompute="full"))
    assert caught.value.field == "parallel.recompute"
    best = recommend(query=asked(True, micro_batch_size=(1, 2)), top=50).recommendations
    assert best and all(row.parallel.recompute != "full" for row in best)


def test_a_dense_model_has_nothing_to_hide() -> None:
    with pytest.raises(InputError) as caught:
        estimate(query=asked(True, model="llama-3-70b", expert_parallel_size=1))
    assert caught.value.field == "training.overlap.expert_parallel"
