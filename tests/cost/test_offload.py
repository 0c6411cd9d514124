"""Host memory: what the device gets rid of, what the host takes up, and what the way there
costs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog import gpu
from hp_tool.catalog import model as library_model
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.optimizer import HOST_MEMORY_FRACTION, PCIE_FRACTION
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.result import Estimate
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions.schema import parse_query, to_dict
from hp_tool.questions.training import estimate
from tests.cost.cases import Problem, columns, problems
from tests.torch_or_skip import torch_or_skip

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1},
    "training": {"sequence_length": 4096, "global_batch_size": 16},
    "parallel": {"recompute": "full"},
}
PARAMETERS = 8_030_261_248
shares = st.sampled_from((0.25, 0.5, 1.0))


def asked(*, cluster: Any = None, parallel: Any = None, **training: Any) -> Estimate:
    query = QUERY | {
        "training": QUERY["training"] | training,
        "cluster": QUERY["cluster"] | (cluster or {}),
        "parallel": QUERY["parallel"] | (parallel or {}),
    }
    return estimate(query=parse_query(query), with_fixes=False)


def test_states_move_to_the_host_which_updates_them() -> None:
    """8B parameters: 12 bytes each leave the device, 16 are pinned on the host; 4 come down, 2 go
    up over PCIe 5, and the host reads and writes 28.
    """
    plain, moved = asked(), asked(offload="optimizer")
    assert plain.memory and moved.memory and plain.time and moved.time
    assert plain.memory.optimizer_bytes == pytest.approx(12 * PARAMETERS, rel=1e-3)
    assert moved.memory.optimizer_bytes == 0 and plain.memory.host_bytes == 0
    assert moved.memory.host_bytes == pytest.approx(16 * PARAMETERS, rel=1e-3)
    assert not plain.feasible and moved.feasible
    copies, update = (
        6 * PARAMETERS / (PCIE_FRACTION * 64e9),
        28 * PARAMETERS / (HOST_MEMORY_FRACTION * 76.8e9),
    )
    assert moved.time.parts_s["offload"] == pytest.approx(copies + update, rel=1e-3)
    assert moved.time.parts_s["optimizer"] == 0 and plain.time.parts_s["offload"] == 0


@pytest.mark.components
def test_pinned_memory_is_what_torch_keeps_on_the_host() -> None:
    """Parameter, gradient and both states of a CPU AdamW, as Megatron's hybrid optimizer runs
    it.
    """
    torch = torch_or_skip()
    parameter = torch.nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    states = [
        state for state in optimizer.state[parameter].values() if state.shape == parameter.shape
    ]
    held = sum(tensor.untyped_storage().nbytes() for tensor in (parameter, parameter.grad, *states))
    memory = asked(offload="optimizer").memory
    assert memory is not None
    assert memory.host_bytes == pytest.approx(held / 1000 * PARAMETERS, rel=1e-3)


@given(problems(gpu="a100-sxm-80gb"), shares, st.sampled_from(("adam", "sgd")))
def test_what_leaves_the_device_is_the_share_asked_for(
    case: tuple[Problem, ParallelConfig], share: float, optimizer: str
) -> None:
    problem, config = case
    workload = replace(problem.workload, optimizer=optimizer)  # type: ignore[arg-type]
    offloaded = replace(workload, offload="optimizer", offload_fraction=share)
    before, after = (
        replace(problem, workload=one).costs([config]) for one in (workload, offloaded)
    )
    if before.worst_stage[0] == after.worst_stage[0]:
        expected = (1 - share) * before.memory_parts["optimizer"][0]
        assert after.memory_parts["optimizer"][0] == pytest.approx(expected, abs=1)
    assert after.memory_total_bytes[0] < before.memory_total_bytes[0]
    assert after.step_s[0] > before.step_s[0]
    np.testing.assert_allclose(sum(after.parts.values()), after.step_s, rtol=1e-12)
    for name in ("gradients", "weights"):
        assert (
            after.memory_parts[name][0] <= before.memory_parts[name][0]
            or before.worst_stage[0] != after.worst_stage[0]
        )


@given(problems(gpu="a100-sxm-80gb"), shares)
def test_activations_on_the_host_never_need_more_of_the_device_nor_less_time(
    case: tuple[Problem, ParallelConfig], share: float
) -> None:
    problem, config = case
    offloaded = replace(problem.workload, offload="activations", offload_fraction=share)
    before, after = problem.costs([config]), replace(problem, workload=offloaded).costs([config])
    assert after.memory_total_bytes[0] <= before.memory_total_bytes[0] * (1 + 1e-12)
    assert after.step_s[0] >= before.step_s[0] * (1 - 1e-12)
    assert after.host_bytes[0] > 0
    alone = replace(problem, workload=offloaded).costs(Candidates.alone(config))
    assert columns(alone)["memory_total_bytes"] == after.memory_total_bytes[0]


@given(problems(gpu="a100-sxm-80gb"), st.sampled_from(("optimizer", "activations")), shares)
def test_a_slower_link_never_makes_a_step_faster(
    case: tuple[Problem, ParallelConfig], what: str, share: float
) -> None:
    problem, config = case
    workload = replace(problem.workload, offload=what, offload_fraction=share)  # type: ignore[arg-type]
    device = problem.cluster.gpu
    slow = replace(
        device, pcie_bandwidth_bytes_per_second=device.pcie_bandwidth_bytes_per_second / 4
    )
    times = [
        replace(problem, workload=workload, cluster=replace(problem.cluster, gpu=one))
        .costs([config])
        .step_s[0]
        for one in (device, slow)
    ]
    assert times[1] >= times[0]


def test_copies_hide_behind_compute_where_there_is_enough_of_it() -> None:
    """Full recomputation keeps only each layer's input: 64 MiB a layer take 1.3 ms, less than a
    layer's passes.
    """
    hidden = asked(offload="activations", parallel={"micro_batch_size": 2})
    waiting = asked(offload="activations", parallel={"recompute": "none"}, sequence_length=1024)
    assert hidden.time and waiting.time and hidden.memory
    assert hidden.time.parts_s["offload"] == 0.0
    assert waiting.time.parts_s["offload"] > 0.0
    assert hidden.memory.host_bytes == pytest.approx(32 * 2 * 4096 * 4096 * 2)


def test_host_memory_is_a_limit_where_it_is_known() -> None:
    device = to_dict(gpu("h100-sxm-80gb"))
    small = asked(
        offload="optimizer", cluster={"gpu": device | {"name": "small", "host_memory_bytes": 64e9}}
    )
    assert not small.feasible and [reason.code for reason in small.reasons] == ["host_memory"]
    assert small.reasons[0].available == 64e9 and "offload_fraction" in small.reasons[0].message
    unknown = asked(
        offload="optimizer", cluster={"gpu": device | {"name": "any", "host_memory_bytes": None}}
    )
    assert unknown.feasible


@pytest.mark.parametrize(
    ("training", "cluster", "kind", "field"),
    [
        ({"offload_fraction": 0.5}, {}, InputError, "training.offload_fraction"),
        ({"offload": "none", "offload_fraction": 0.5}, {}, InputError, "training.offload_fraction"),
        (
            {"offload": "optimizer", "offload_fraction": 0.0},
            {},
            InputError,
            "training.offload_fraction",
        ),
        ({"offload": "optimizer", "optimizer": "muon"}, {}, UnsupportedError, "training.offload"),
        (
            {"offload": "optimizer"},
            {"gpu": "l40s-48gb"},
            InputError,
            "cluster.gpu.host_memory_bandwidth_bytes_per_second",
        ),
    ],
)
def test_what_cannot_be_offloaded_is_refused(
    training: dict[str, Any], cluster: dict[str, Any], kind: type[Exception], field: str
) -> None:
    with pytest.raises(kind) as caught:
        asked(cluster=cluster, **training)
    assert caught.value.field == field  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("share", "on_device"), [(0.5, 16.0), (15 / 16, 2.0), (31 / 32, 2.0), (1.0, 2.0)]
)
def test_two_layers_activations_stay_on_the_device_while_they_are_copied(
    share: float, on_device: float
) -> None:
    """Full recomputation keeps a layer's input, 2 s b h bytes, of 32 layers. One is being copied
    and one in use, where the layers that are never sent leave them no room; with half of them sent
    their room is free in time.
    """
    layer = 2 * 4096 * 4096
    moved, plain = asked(offload="activations", offload_fraction=share).memory, asked().memory
    assert moved and plain
    assert plain.activations_bytes - moved.activations_bytes == pytest.approx(
        (32 - on_device) * layer
    )
    assert moved.host_bytes == pytest.approx(share * 32 * layer)


def test_one_layer_cannot_be_half_away() -> None:
    """A model of one layer sends it whole, and has it on the device on its way: nothing is
    freed.
    """
    model = to_dict(library_model("llama-3-8b")) | {"name": "one layer", "num_hidden_layers": 1}
    memory = [
        estimate(
            query=parse_query(QUERY | {"model": model, "training": QUERY["training"] | more}),
            with_fixes=False,
        ).memory
        for more in ({}, {"offload": "activations"})
    ]
    assert memory[0] and memory[1]
    assert memory[1].activations_bytes == memory[0].activations_bytes and memory[1].host_bytes > 0
