"""Waits for stragglers, against drawn devices and hand arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hp_tool.catalog import cluster, model
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.stragglers import deviations_of_slowest, straggler_share
from hp_tool.cost.training import training_costs
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload
from tests.cost.cases import case_of
from tests.cost.test_primitives import plain_profile

DEVICE, MICRO_BATCH = 0.03, 0.04


def run(
    num_gpus: int, *, micro_batches: int = 16, precision: str = "bf16", recipe: str | None = None
) -> TrainingCase:
    machine = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=num_gpus))
    workload = TrainingWorkload(
        sequence_length=2048,
        global_batch_size=num_gpus * micro_batches,
        precision=precision,  # type: ignore[arg-type]
        fp8_recipe=recipe,  # type: ignore[arg-type]
    )
    profile = plain_profile(machine)
    framework = replace(
        profile.framework, device_log_sd=DEVICE, micro_batch_log_sd=MICRO_BATCH, host_launch_s=0.0
    )
    case = case_of(model=model("llama-3-8b"), workload=workload, cluster=machine)
    return replace(case, profile=replace(profile, framework=framework))


def share(case: TrainingCase, zero_stage: int, micro_batches: float = 16.0) -> float:
    config = ParallelConfig(data_parallel_size=case.cluster.num_gpus, zero_stage=zero_stage)
    return float(
        straggler_share(
            case=case,
            candidates=Candidates.alone(config),
            micro_batches=micro_batches,
            devices=case.cluster.num_gpus,
        )
    )


@pytest.mark.parametrize("devices", [16, 128, 2048])
def test_the_slowest_device_is_as_far_from_the_mean_as_the_slowest_drawn(devices: int) -> None:
    drawn = np.random.default_rng(0).standard_normal((4000, devices)).max(axis=1).mean()
    server = 1.4236  # expected maximum of 8 normal values (Teichroew, 1956)
    assert deviations_of_slowest(devices) == pytest.approx(drawn - server, abs=0.03)


def test_a_single_server_has_no_wait_beyond_its_measured_constants() -> None:
    assert share(run(8), 1) == share(run(4), 1) == 0.0


def test_replicas_that_wait_for_each_other_once_a_step_average_their_micro_batches() -> None:
    z = deviations_of_slowest(64)
    once, always = np.hypot(DEVICE, MICRO_BATCH / 4.0), np.hypot(DEVICE, MICRO_BATCH)
    for zero_stage, sd in ((0, once), (1, once), (2, always), (3, always)):
        assert share(run(64), zero_stage) == pytest.approx(z * sd)


def test_delayed_scaling_makes_replicas_wait_after_each_micro_batch() -> None:
    """Megatron Core reduces the maxima over all replicas; tensorwise scales need none."""
    for recipe in (None, "delayed"):
        assert share(run(64, precision="fp8", recipe=recipe), 1) == share(run(64), 2)
    assert share(run(64, precision="fp8", recipe="tensorwise"), 1) == share(run(64), 1)


def test_the_wait_is_added_where_replicas_exchange_gradients() -> None:
    case = run(64)
    config = Candidates.alone(ParallelConfig(data_parallel_size=64))
    alike = replace(case.profile.framework, device_log_sd=0.0, micro_batch_log_sd=0.0)
    unequal, equal = (
        training_costs(case=each, candidates=config).parts
        for each in (case, replace(case, profile=replace(case.profile, framework=alike)))
    )
    compute = sum(float(equal[name]) for name in ("compute", "attention", "recompute"))
    for name, seconds in equal.items():
        wait = share(case, 1) * compute if name == "data_parallel" else 0.0
        assert float(unequal[name]) == pytest.approx(float(seconds) + wait)
