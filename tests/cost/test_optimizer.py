"""Bytes and FLOPs of optimizers, against torch's own and against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog import model
from hp_tool.cost.optimizer import bytes_per_parameter, newton_schulz_flops
from hp_tool.cost.parameters import total_parameters
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate
from tests.cost.cases import Problem, problems
from tests.torch_or_skip import torch_or_skip

WORKLOAD = TrainingWorkload(sequence_length=2048, global_batch_size=64)
QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
    "training": {"sequence_length": 4096, "global_batch_size": 64},
    "parallel": {"tensor_parallel_size": 2, "recompute": "full"},
}


@pytest.mark.components
@pytest.mark.parametrize(
    ("name", "options"), [("Adam", {}), ("SGD", {"momentum": 0.9}), ("Muon", {})]
)
def test_states_are_what_torch_keeps(name: str, options: dict[str, Any]) -> None:
    """After one step on fp32 parameters, whose master copy they are themselves."""
    torch = torch_or_skip()
    parameter = torch.nn.Parameter(torch.ones(64, 48))
    parameter.grad = torch.ones_like(parameter)
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **options)
    optimizer.step()
    kept = sum(
        state.untyped_storage().nbytes()
        for state in optimizer.state[parameter].values()
        if torch.is_tensor(state) and state.shape == parameter.shape
    )
    size = bytes_per_parameter(replace(WORKLOAD, precision="fp32", optimizer=name.lower()))  # type: ignore[arg-type]
    assert kept == parameter.numel() * (size.optimizer - size.lighter_matrices)


@pytest.mark.parametrize(
    ("precisions", "total"),
    [
        ({}, 18),
        (
            {"optimizer_precision": "bf16"},
            14,
        ),  # DeepSeek-V3's moments, arXiv 2412.19437 section 3.3.2
        (
            {
                "optimizer_precision": "fp8",
                "exp_avg_sq_precision": "fp16",
                "master_precision": "fp16",
            },
            2 + 4 + 1 + 2 + 2,
        ),
        ({"optimizer_precision": "bf16", "master_precision": "remainder"}, 12),
        (
            {
                "gradient_precision": "bf16",
                "optimizer_precision": "bf16",
                "master_precision": "none",
            },
            8,
        ),
        ({"optimizer": "sgd"}, 14),
    ],
)
def test_bytes_of_a_parameter(precisions: dict[str, Any], total: float) -> None:
    """The third is FP8-LM's optimizer (arXiv 2310.18313 section 2.2) with fp32 gradients: 1 + 2 + 2
    bytes of states.
    """
    size = bytes_per_parameter(replace(WORKLOAD, **precisions))
    assert size.weights + size.gradients + size.optimizer == total


@pytest.mark.components
@given(rows=st.sampled_from((64, 96, 160)), columns=st.sampled_from((64, 128, 224)))
def test_orthogonalisation_has_the_flops_that_torch_counts(rows: int, columns: int) -> None:
    torch = torch_or_skip()
    from torch.optim import _muon
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        _muon._zeropower_via_newtonschulz(
            torch.randn(rows, columns), (3.4445, -4.775, 2.0315), 5, 1e-7
        )
    assert newton_schulz_flops(rows, columns) == counter.get_total_flops()


def test_muon_keeps_one_state_of_matrices_and_two_of_the_rest() -> None:
    """Llama 3 8B on one device: 12 bytes a parameter of states and master copy, 4 fewer for each of
    the layers' matrices.
    """
    found = estimate(
        query=parse_query(
            QUERY
            | {
                "cluster": {"gpu": "h200", "num_gpus": 1},
                "parallel": {},
                "training": QUERY["training"] | {"optimizer": "muon"},
            }
        )
    )
    shape = model("llama-3-8b")
    matrices = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert found.memory is not None
    assert found.memory.optimizer_bytes == pytest.approx(
        12 * total_parameters(shape) - 4 * matrices, rel=1e-12
    )


def seconds(**changes: Any) -> dict[str, float]:
    training = QUERY["training"] | {"optimizer": changes.pop("optimizer", "muon")}
    cluster = QUERY["cluster"] | {"num_gpus": changes.pop("num_gpus", 16)}
    query = QUERY | {
        "cluster": cluster,
        "training": training,
        "parallel": QUERY["parallel"] | changes,
    }
    found = estimate(query=parse_query(query))
    assert found.time is not None
    return found.time.parts_s


def test_matrices_are_dealt_out_to_the_replicas_until_each_has_one() -> None:
    alone = seconds(zero_stage=0)["optimizer"]
    few, many = (seconds(zero_stage=1, num_gpus=gpus)["optimizer"] for gpus in (8, 32))
    assert alone > few > many
    # An H100 at its peak would need this long for what two tensor-parallel ranks turn; queries,
    # keys and values apart.
    flops = sum(
        newton_schulz_flops(rows, columns)
        for rows, columns in (
            (2048, 4096),
            (512, 4096),
            (512, 4096),
            (4096, 2048),
            (14336, 4096),
            (4096, 7168),
        )
    )
    assert alone > 32 * flops / 989.4e12
    assert alone < 32 * flops / 989.4e12 * 3


def test_muon_reduces_whole_gradients_where_states_are_dealt_out_by_matrix() -> None:
    """Megatron's layer-wise optimizer all-reduces them: 8 bytes a parameter and 2 gathered, where
    Adam sends 4 and 2.
    """
    muon, adam = (
        seconds(optimizer=name, zero_stage=1, num_gpus=32)["data_parallel"]
        for name in ("muon", "adam")
    )
    assert muon >= adam
    # Sharding gradients saves both passes over them; Muon must bring the shards of momenta
    # together.
    saved = [
        seconds(optimizer=name, zero_stage=1)["optimizer"]
        - seconds(optimizer=name, zero_stage=2)["optimizer"]
        for name in ("muon", "adam")
    ]
    assert saved[0] < saved[1]


@given(problems(), st.sampled_from(("sgd", "adam", "muon")))
def test_cheaper_optimizers_never_keep_more(
    case: tuple[Problem, ParallelConfig], name: str
) -> None:
    problem, config = case
    adam, other = (
        replace(problem, workload=replace(problem.workload, optimizer=optimizer)).costs([config])  # type: ignore[arg-type]
        for optimizer in ("adam", name)
    )
    assert other.memory_total_bytes[0] <= adam.memory_total_bytes[0]
    if other.worst_stage[0] == adam.worst_stage[0]:  # the parts are that stage's
        assert other.memory_parts["optimizer"][0] <= adam.memory_parts["optimizer"][0]
        assert other.memory_parts["weights"][0] == adam.memory_parts["weights"][0]


@pytest.mark.parametrize(
    ("training", "field"),
    [
        ({"optimizer": "sgd", "exp_avg_sq_precision": "bf16"}, "training.exp_avg_sq_precision"),
        ({"precision": "fp32", "master_precision": "fp32"}, "training.master_precision"),
        ({"precision": "fp16", "master_precision": "remainder"}, "training.master_precision"),
    ],
)
def test_states_that_do_not_exist_are_refused(training: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        estimate(query=parse_query(QUERY | {"training": QUERY["training"] | training}))
    assert caught.value.field == field
