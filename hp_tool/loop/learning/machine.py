"""Micro-benchmarks of a cluster: run them, fit and store constants, and check a training step."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hp_tool.catalog.efficiency import MachineProfile, efficiency_profile, gpu_efficiency
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.training import training_costs
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec, GpuSpec, Precision
from hp_tool.domain.measurement import Measurement, ProfileRequest
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Launcher
from hp_tool.domain.requests import BenchmarkRequest, RunRequest
from hp_tool.domain.states import JobState
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, LauncherError
from hp_tool.loop.calibration.microbenchmarks import (
    ELEMENT_BYTES,
    Outlier,
    find_outliers,
    fit_machine,
    plan_operations,
)

_POLL_S = 0.2
_FRAMEWORK = "megatron-core"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """Measured and predicted times of one real training step, in seconds."""

    what: str
    before_s: float
    """Predicted seconds with the cluster's previous constants."""
    after_s: float
    """Predicted seconds with the newly measured constants."""
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """Result of benchmarking a cluster."""

    cluster: str
    profile: MachineProfile
    errors: dict[str, tuple[int, float]]
    """(number of operations, median relative error) of each fit on its own rows."""
    outliers: tuple[Outlier, ...]
    wall_s: float
    check: StepCheck | None = None


def benchmark_machine(
    *,
    cluster: ClusterSpec,
    launcher: Launcher,
    precisions: Sequence[Precision],
    timeout_s: float = 900.0,
) -> tuple[MachineReport, Measurement]:
    """Time operations on all of the cluster's devices at once and fit its constants.

    Do not store them.

    Raises:
        InputError: The launcher has other devices (`launcher_mismatch`).
        LauncherError: The job failed.
    """
    hardware = launcher.hardware()
    if hardware.gpu != cluster.gpu.name:
        message = (
            f"the launcher runs on {hardware.gpu}, cluster {cluster.name} has {cluster.gpu.name}"
        )
        raise InputError(message, field="--launcher", code="launcher_mismatch")
    started = time.monotonic()
    request = BenchmarkRequest(
        run_id="microbenchmarks",
        operations=plan_operations(cluster, precisions=precisions),
        num_gpus=cluster.num_gpus,
        gpu=cluster.gpu.name,
        timeout_s=timeout_s,
    )
    measured = run_job(launcher, request)
    where = measured.hardware.device_name if measured.hardware else cluster.gpu.name
    software = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    fit = fit_machine(
        measured.operations,
        cluster=cluster,
        start=gpu_efficiency(cluster.gpu),
        fitted_on=f"{len(measured.operations)} operations timed on {cluster.num_gpus} x {where}; "
        f"{software}; "
        "by hp-tool calibrate --cluster",
    )
    report = MachineReport(
        cluster=cluster.name,
        profile=MachineProfile(gpu=fit.gpu, network=fit.network),
        errors=fit.errors,
        outliers=find_outliers(measured.operations, hosts=hosts_of_ranks(measured, cluster)),
        wall_s=time.monotonic() - started,
    )
    return report, measured


def check_step(
    *, cluster: ClusterSpec, launcher: Launcher, profile: MachineProfile, precision: Precision
) -> StepCheck:
    """Train a small GPT on all devices for a few steps.

    Compare the step time with the predictions of both profiles.
    """
    request = small_training(cluster, precision=precision)
    measured = run_job(launcher, request)
    if measured.step_s is None:
        raise LauncherError(
            f"The training step for the check failed ({measured.status}): {measured.cause}"
        )
    before = efficiency_profile(gpu=cluster.gpu, framework=_FRAMEWORK, cluster=cluster.name)
    return StepCheck(
        what=f"{request.model.num_hidden_layers}-layer GPT, hidden_size "
        f"{request.model.hidden_size}, TP "
        f"{request.parallel.tensor_parallel_size} x DP {request.parallel.data_parallel_size}, "
        f"{precision}",
        before_s=predicted_step_s(request, cluster=cluster, profile=before),
        after_s=predicted_step_s(
            request, cluster=cluster, profile=with_measured_constants(profile, to=before)
        ),
        measured_s=measured.step_s,
    )


def with_measured_constants(machine: MachineProfile, *, to: EfficiencyProfile) -> EfficiencyProfile:
    """Return a framework's profile with the constants of a measured machine."""
    network = machine.network or to.framework.network
    return EfficiencyProfile(gpu=machine.gpu, framework=replace(to.framework, network=network))


def predicted_step_s(
    request: ProfileRequest, *, cluster: ClusterSpec, profile: EfficiencyProfile
) -> float:
    """Return the predicted step time of a training request, in seconds."""
    costs = training_costs(
        case=TrainingCase(
            model=request.model, cluster=cluster, workload=request.training, profile=profile
        ),
        candidates=Candidates.from_configs([request.parallel]),
    )
    return float(costs.step_s[0])


def small_training(cluster: ClusterSpec, *, precision: Precision) -> ProfileRequest:
    """Return a training request for a GPT that fits on any device.

    It uses TP 2 if there are two devices, and data parallelism over the rest.
    """
    cpu = cluster.gpu.kind == "cpu"
    width, heads, sequence = (256, 8, 128) if cpu else (2048, 16, 2048)
    tensor = 2 if cluster.gpus_per_node % 2 == 0 else 1
    data = cluster.num_gpus // tensor
    return ProfileRequest(
        run_id="step",
        model=ModelSpec(
            name="small-gpt",
            num_hidden_layers=4,
            hidden_size=width,
            num_attention_heads=heads,
            vocab_size=32 * width,
        ),
        training=TrainingWorkload(
            sequence_length=sequence, global_batch_size=4 * data, precision=precision
        ),
        parallel=ParallelConfig(
            tensor_parallel_size=tensor, data_parallel_size=data, sequence_parallel=tensor > 1
        ),
        num_gpus=cluster.num_gpus,
        gpu=cluster.gpu.name,
        steps=6,
        warmup_steps=2,
        timeout_s=600.0,
    )


def run_job(launcher: Launcher, request: RunRequest) -> Measurement:
    """Submit a job, wait for it and fetch its measurement.

    If a training run fails, its measurement is returned.

    Raises:
        LauncherError: A run other than training failed.
    """
    plan = launcher.plan(request, job_name=f"{request.run_id}-{uuid.uuid4().hex[:12]}")
    handle = launcher.submit(plan)
    try:
        while launcher.poll([handle])[handle] in (JobState.QUEUED, JobState.RUNNING):
            time.sleep(_POLL_S)
    except BaseException:
        launcher.cancel(plan.job_name)
        raise
    measurement = launcher.fetch(handle)
    if measurement.status != "ok" and not isinstance(request, ProfileRequest):
        raise LauncherError(f"{request.run_id} ended as {measurement.status}: {measurement.cause}")
    return measurement


def hosts_of_ranks(measured: Measurement, cluster: ClusterSpec) -> list[str]:
    """Return the host of each rank. Hosts are in rank order, with equally many ranks each."""
    hosts: Any = measured.hardware.hosts if measured.hardware else ()
    names = (
        hosts
        if len(hosts) == cluster.num_nodes
        else [f"node {number}" for number in range(cluster.num_nodes)]
    )
    return [names[rank // cluster.gpus_per_node] for rank in range(cluster.num_gpus)]


def checked_precisions(names: Sequence[str], *, gpu: GpuSpec) -> tuple[Precision, ...]:
    """Return the precisions in which operations can be timed on this device.

    Raises:
        InputError: The device does not support a precision.
    """
    timed = [precision for precision in ELEMENT_BYTES if precision in gpu.peak_flops_per_second]
    unknown = [name for name in names if name not in timed]
    if unknown:
        message = f"operations are timed in {', '.join(timed)} on {gpu.name}, not in {unknown[0]!r}"
        raise InputError(message, field="--precision")
    return tuple(
        precision for name in dict.fromkeys(names) for precision in timed if precision == name
    )
