"""Run one rank: read the request, run it, and write the result atomically."""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import re
import socket
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter

from hp_tool.cluster.profiler import support
from hp_tool.domain.measurement import JobResult, Measurement, ProfileRequest, interquartile_range
from hp_tool.domain.requests import BenchmarkRequest, InferenceRequest, RunRequest
from hp_tool.domain.steps import RUN_PREFIX
from hp_tool.domain.switches import device_connections

if TYPE_CHECKING:
    import torch

_REQUEST: TypeAdapter[RunRequest] = TypeAdapter(Annotated[RunRequest, Field(discriminator="kind")])

_BROKEN_DEVICE = re.compile(
    r"uncorrectable|ECC error|hardware (stack )?error|fallen off the bus|\bXid\b|CUDA-capable "
    r"device\(s\) is/are busy"
    r"|device (is )?unavailable|system not yet initialized",
    re.IGNORECASE,
)
"""Errors of a broken GPU, on which other runs would fail, too."""
_INHERITED = frozenset(os.environ)
_NO_PEAKS: dict[str, Any] = {
    "peak_memory_bytes": None,
    "peak_reserved_bytes": None,
    "peak_memory_bytes_per_rank": (),
    "peak_memory_source": None,
}
"""Memory fields of later configurations in a process on a CPU. They are empty, because the host's
heap does not shrink after the first model.
"""
_LOG_TAIL_CHARACTERS = 4096
_CAUSE_CHARACTERS = 500


def main() -> int:
    """Return 0 if the result was written, 1 if this rank reported a failure."""
    parser = argparse.ArgumentParser(prog="python -m hp_tool.cluster.profiler", description=__doc__)
    parser.add_argument("request", type=Path)
    parser.add_argument("result", type=Path)
    arguments = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    try:
        request = read_request(arguments.request)
        measurement = profile(request)
        # Store each measurement before the next run starts.
        for result in itertools.chain([measurement], measure_rivals(request, measurement)):
            if rank == 0:
                write_measurement(arguments.result, result)
    except Exception as error:
        traceback.print_exc()
        write_measurement(
            failure_path(arguments.result, rank=rank), failure_report(error, rank=rank)
        )
        return 1
    return 0


def profile(request: RunRequest) -> Measurement:
    """Run the request on all ranks.

    Each rank returns the same measurement, or raises its own error.
    """
    if isinstance(request, ProfileRequest):
        connections = device_connections(workload=request.training, parallel=request.parallel)
        if connections is not None:
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    # If every rank printed Megatron's warnings, they would push a failure out of the log's tail.
    warnings.simplefilter("ignore")
    started = time.monotonic()
    match request:
        case ProfileRequest():
            support.check_training(request)
        case InferenceRequest():
            support.check_serving(request)
            if request.runner == "vllm":
                from hp_tool.cluster.profiler import vllm_bench

                return vllm_bench.serve(request)

    from hp_tool.cluster.profiler import backend

    device = backend.start(request)
    switched_off = (
        isinstance(request, ProfileRequest) and request.training.framework == "megatron-core"
    )
    known: dict[str, Any] = {
        "hardware": backend.hardware(request, device=device),
        "versions": backend.versions(),
        "differences": support.supported_overlaps(request)[1] if switched_off else {},
    }
    if os.environ["RANK"] == "0":
        print(
            RUN_PREFIX
            + TypeAdapter(Measurement).dump_json(Measurement(status="ok", **known)).decode(),
            flush=True,
        )
    match request:
        case ProfileRequest():
            measurement = _train(request, device=device)
        case InferenceRequest():
            measurement = _serve(request, device=device)
        case BenchmarkRequest():
            from hp_tool.cluster.profiler import operations

            measurement = Measurement(
                status="ok", operations=operations.time_all(request, device=device)
            )
    versions = known["versions"] | measurement.versions
    return replace(measurement, **known | {"versions": versions}, wall_s=time.monotonic() - started)


def measure_rivals(request: RunRequest, first: Measurement) -> Iterator[JobResult]:
    """Measure the rival configurations of a request, one after another in the same processes.

    After each rival, yield the first configuration's measurement with all rivals measured so far.
    If a rank fails, the job ends, but earlier results remain.
    """
    if not isinstance(request, ProfileRequest):
        return
    from hp_tool.cluster.profiler import backend

    device, rivals = backend.device(request), list[Measurement]()
    for parallel in request.rivals:
        # When a rank fails, torchrun ends the others. Rank 0 must have written earlier results by
        # then.
        sys.modules["torch"].distributed.barrier()
        started, rival_request = time.monotonic(), replace(request, parallel=parallel, rivals=())
        support.check_training(rival_request)
        free_previous_model()
        measurement = replace(
            _train(rival_request, device=device),
            hardware=first.hardware,
            versions=first.versions,
            differences=support.supported_overlaps(rival_request)[1]
            if request.training.framework == "megatron-core"
            else {},
            wall_s=time.monotonic() - started,
        )
        rivals.append(measurement if device.type == "cuda" else replace(measurement, **_NO_PEAKS))
        first_fields = {each.name: getattr(first, each.name) for each in fields(Measurement)}
        total_s = (first.wall_s or 0.0) + sum(rival.wall_s or 0.0 for rival in rivals)
        yield JobResult(**first_fields | {"wall_s": total_s, "rivals": tuple(rivals)})


def free_previous_model() -> None:
    """Free the previous model, its process groups and buffers, and Megatron's attention state."""
    gc.collect()
    if (torch := sys.modules["torch"]).cuda.is_available():
        torch.cuda.empty_cache()
    if (megatron := sys.modules.get("megatron.core")) is not None:
        megatron.parallel_state.destroy_model_parallel()
    if (engine := sys.modules.get("transformer_engine.pytorch.module.base")) is not None:
        engine.destroy_ub()
    for name in [
        name for name in os.environ if name.startswith("NVTE_") and name not in _INHERITED
    ]:
        del os.environ[name]


def _train(request: ProfileRequest, *, device: torch.device) -> Measurement:
    is_native = request.training.framework == "torch-fsdp"
    if not is_native:
        _prepare_megatron(device)

    from hp_tool.cluster.profiler.memory import MemoryMeter

    meter = MemoryMeter(device)
    if is_native:
        from hp_tool.cluster.profiler.native import training as native

        steps = native.train(request, device=device)
    else:
        from hp_tool.cluster.profiler import model, training

        steps = training.train(request, model.build(request, device=device), device=device)
    step_s = statistics.median(steps.times_s)
    tokens = request.training.global_batch_size * request.training.sequence_length
    return meter.add_to(
        Measurement(
            status="ok",
            step_s=step_s,
            step_s_spread=interquartile_range(steps.times_s),
            step_times_s=steps.times_s,
            warmup_times_s=steps.warmup_s,
            tokens_per_second_per_gpu=tokens / step_s / request.num_gpus,
            losses=steps.losses,
            devices=steps.devices,
            versions={} if steps.driver is None else {"driver": steps.driver},
            breakdown_s=steps.breakdown_s,
            fidelity=request.fidelity,
            cause=steps.stopped,
        )
    )


def _serve(request: InferenceRequest, *, device: torch.device) -> Measurement:
    _prepare_megatron(device)

    from hp_tool.cluster.profiler import serving
    from hp_tool.cluster.profiler.memory import MemoryMeter

    meter = MemoryMeter(device)
    return meter.add_to(Measurement(status="ok", serving=serving.serve(request, device=device)))


def _prepare_megatron(device: torch.device) -> None:
    if device.type == "cpu":
        from hp_tool.cluster.profiler import cpu_shim

        cpu_shim.install()


def failure_report(error: Exception, *, rank: int) -> Measurement:
    """Return this rank's report of a failure."""
    status = "crashed"
    if "torch" in sys.modules:
        from hp_tool.cluster.profiler.memory import is_out_of_memory

        status = "oom" if is_out_of_memory(error) else "crashed"
    message = " ".join(str(error).split())[:_CAUSE_CHARACTERS]
    broken = _BROKEN_DEVICE.search(message) is not None
    return Measurement(
        status="preempted" if broken else status,  # The device is broken.
        suspects=(socket.gethostname(),) if broken else (),
        cause=f"rank {rank}: {type(error).__name__}: {message}".removesuffix(": "),
        log_tail=traceback.format_exc()[-_LOG_TAIL_CHARACTERS:],
    )


def read_request(path: Path) -> RunRequest:
    """Read a request. Raise pydantic.ValidationError if it is invalid."""
    return _REQUEST.validate_json(path.read_bytes(), strict=True)


def write_measurement(path: Path, measurement: Measurement) -> None:
    """Write `measurement` atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(TypeAdapter(type(measurement)).dump_json(measurement, indent=1))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def failure_path(result: Path, *, rank: int) -> Path:
    """Return the path of a rank's failure report, such as result.rank3.json for result.json."""
    return result.with_name(f"{result.stem}.rank{rank}{result.suffix}")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Do not use sys.exit. After the result is written, gloo's threads sometimes abort the
    # interpreter's shutdown. After a failure, NCCL's communicators make it hang.
    os._exit(code)
