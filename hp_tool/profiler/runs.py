"""Each kind of run, from its checked request to its Measurement. What a kind needs is imported when it is asked for."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from hp_tool.domain.measurement import Measurement, ProfileRequest
from hp_tool.domain.requests import BenchmarkRequest, InferenceRequest, RunRequest
from hp_tool.profiler import support

if TYPE_CHECKING:
    import torch

    from hp_tool.profiler.steps import Steps


def train(request: ProfileRequest) -> Measurement:
    """A few optimizer steps of a training configuration."""
    support.check(request)
    started = time.monotonic()
    native = request.training.framework == "torch-fsdp"
    device = _start(request, megatron=not native)

    from hp_tool.profiler import backend
    from hp_tool.profiler.clock import interquartile_range
    from hp_tool.profiler.memory import MemoryMeter

    meter = MemoryMeter(device)
    steps = _native_steps(request, device=device) if native else _megatron_steps(request, device=device)
    measured = steps.times_s[request.warmup_steps :]
    step_s = statistics.median(measured)
    tokens = request.training.global_batch_size * request.training.sequence_length
    return Measurement(
        status="ok",
        step_s=step_s,
        step_s_spread=interquartile_range(measured),
        step_times_s=measured,
        tokens_per_second_per_gpu=tokens / step_s / request.num_gpus,
        **meter.measured(),
        losses=steps.losses,
        breakdown_s=steps.breakdown_s,
        fidelity=request.fidelity,
        hardware=backend.hardware(request, device=device),
        versions=backend.versions(),
        wall_s=time.monotonic() - started,
        cause=steps.stopped,
    )


def _megatron_steps(request: ProfileRequest, *, device: torch.device) -> Steps:
    from hp_tool.profiler import model, training

    return training.train(request, model.build(request, device=device), device=device)


def _native_steps(request: ProfileRequest, *, device: torch.device) -> Steps:
    from hp_tool.profiler.native import training

    return training.train(request, device=device)


def serve(request: InferenceRequest) -> Measurement:
    """A few answers of one replica of a serving configuration."""
    support.check_serving(request)
    if request.runner == "vllm":
        from hp_tool.profiler import vllm_bench

        return vllm_bench.serve(request)
    started = time.monotonic()
    device = _start(request)

    from hp_tool.profiler import backend, serving
    from hp_tool.profiler.memory import MemoryMeter

    meter = MemoryMeter(device)
    times = serving.serve(request, device=device)
    return Measurement(
        status="ok",
        serving=times,
        **meter.measured(),
        hardware=backend.hardware(request, device=device),
        versions=backend.versions(),
        wall_s=time.monotonic() - started,
    )


def time_operations(request: BenchmarkRequest) -> Measurement:
    """Every operation of the request, on every rank."""
    started = time.monotonic()
    from hp_tool.profiler import backend, operations

    device = backend.start(request)
    return Measurement(
        status="ok",
        operations=operations.time_all(request, device=device),
        hardware=backend.hardware(request, device=device),
        versions=backend.versions(),
        wall_s=time.monotonic() - started,
    )


def _start(request: RunRequest, *, megatron: bool = True) -> torch.device:
    """This rank's device, in the process group; on a CPU with Megatron Core made to run there."""
    from hp_tool.profiler import backend

    device = backend.start(request)
    if device.type == "cpu" and megatron:
        from hp_tool.profiler import cpu_shim

        cpu_shim.install()
    return device
