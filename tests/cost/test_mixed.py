"""Two kinds of GPU: two of the same are one cluster, and otherwise the result lies between those of
either kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_tool.domain.result import Estimate
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions import training
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.ranking.rank import cost_space
from tests.cost.cases import columns

A100, H100 = "a100-sxm-80gb", "h100-sxm-80gb"
PARALLEL = {"tensor_parallel_size": 8, "pipeline_parallel_size": 8, "recompute": "selective"}


def asked(
    cluster: dict[str, Any], *, model: str = "llama-2-70b", training: Any = None, **parallel: Any
) -> dict[str, Any]:
    workload = {"sequence_length": 4096, "global_batch_size": 128, "total_tokens": 1e11}
    return {
        "kind": "training",
        "model": model,
        "cluster": cluster,
        "training": workload | (training or {}),
        "parallel": PARALLEL | parallel,
    }


def estimate(*args: Any, **named: Any) -> Estimate:
    return training.estimate(query=parse_query(asked(*args, **named)), with_fixes=False)


def halves(first: str, second: str, num_gpus: int = 64) -> dict[str, Any]:
    return {"stages": [{"gpu": gpu, "num_gpus": num_gpus // 2} for gpu in (first, second)]}


@pytest.mark.parametrize("model", ["llama-2-70b", "mixtral-8x7b"])
def test_two_of_the_same_kind_are_one_cluster(model: str) -> None:
    """All candidates of a space whose stages divide the layers, schedules and recomputation
    varied.
    """
    space = {
        "pipeline_parallel_size": [2, 4, 8],
        "tensor_parallel_size": [2, 4, 8],
        "expert_parallel_size": [1, 2],
        "virtual_pipeline_parallel_size": [1, 2],
        "recompute": ["none", "selective", "full"],
        "micro_batch_size": [1, 2],
    }
    one, two = (
        resolve_training(parse_query(asked(cluster, model=model, **space)))
        for cluster in ({"gpu": H100, "num_gpus": 64}, halves(H100, H100))
    )
    candidates = cost_space(problem=one).candidates
    assert len(candidates) > 50
    plain, mixed = columns(one.costs(candidates)), columns(two.costs(candidates))
    assert set(plain) == set(mixed)
    for name, values in plain.items():
        np.testing.assert_allclose(mixed[name], values, rtol=1e-9, atol=1e-12, err_msg=name)


def test_the_slower_kind_gets_fewer_layers_and_the_step_lies_in_between() -> None:
    slow, fast = (estimate({"gpu": gpu, "num_gpus": 64}) for gpu in (A100, H100))
    for order in ((A100, H100), (H100, A100)):
        found = estimate(halves(*order))
        assert fast.time.step_s < found.time.step_s < slow.time.step_s  # type: ignore[union-attr]
        assert sum(found.time.parts_s.values()) == pytest.approx(found.time.step_s)  # type: ignore[union-attr]
        layers = dict(found.provenance["layers_per_stage"])  # type: ignore[call-overload]
        assert layers[A100] < layers[H100] and 4 * sum(layers.values()) == 80
        assert fast.energy < found.energy < slow.energy and fast.cost < found.cost < slow.cost  # type: ignore[operator]
        even = 0.5 * (1 / slow.time.step_s + 1 / fast.time.step_s)  # type: ignore[union-attr]
        assert 0.85 * even < 1 / found.time.step_s <= even * 1.02  # type: ignore[union-attr]


def test_each_kind_must_fit_into_its_own_memory() -> None:
    """The first stages hold the most activations: they decide on small devices, and no longer where
    those come last.
    """
    small = {"num_gpus": 32, "gpu": "a100-sxm-40gb"}
    large = {"num_gpus": 32, "gpu": "h200-sxm-141gb"}
    first = estimate({"stages": [small, large]}, recompute="none", micro_batch_size=2)
    last = estimate({"stages": [large, small]}, recompute="none", micro_batch_size=2)
    assert first.memory is not None and last.memory is not None
    assert first.memory.worst_stage < 4 and first.memory.capacity_bytes < 41e9
    assert (
        last.memory.total_bytes / last.memory.capacity_bytes
        < first.memory.total_bytes / first.memory.capacity_bytes
    )


def test_stages_of_two_kinds_are_refused_by_name() -> None:
    found = estimate(
        {"stages": [{"gpu": A100, "num_gpus": 24}, {"gpu": H100, "num_gpus": 40}]},
        pipeline_parallel_size=4,
    )
    (reason,) = found.reasons
    assert reason.code == "kinds_not_divisible" and "multiple of 8" in reason.message


@pytest.mark.parametrize(
    ("change", "kind", "field"),
    [
        ({"stages": [{"gpu": A100, "num_gpus": 8}]}, InputError, "cluster.stages"),
        ({**halves(A100, H100), "gpu": H100}, InputError, "cluster.gpu"),
        ({**halves(A100, H100), "num_gpus": 65}, InputError, "cluster.num_gpus"),
        (
            {"stages": [{"gpu": A100, "num_gpus": 8}, {"gpu": "cpu", "num_gpus": 8}]},
            InputError,
            "cluster.stages",
        ),
    ],
)
def test_a_cluster_that_is_none_is_refused(
    change: dict[str, Any], kind: type[Exception], field: str
) -> None:
    with pytest.raises(kind) as caught:
        estimate(change)
    assert caught.value.field == field  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"pipeline_schedule": "zb-h1"}, "parallel.pipeline_schedule"),
        ({"rank_order": "tp-pp-dp"}, "parallel.rank_order"),
        ({"model": "t5-11b"}, "model"),
    ],
)
def test_what_two_kinds_do_not_model_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        estimate(halves(A100, H100), **change)
    assert caught.value.field == field
