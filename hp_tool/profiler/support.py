"""The profiler's own check of a request, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from hp_tool.domain.measurement import ProfileRequest
from hp_tool.domain.parallel import ParallelConfig, recompute_name
from hp_tool.domain.profiling import unprofiled, unprofiled_sizes
from hp_tool.domain.requests import InferenceRequest
from hp_tool.domain.serving_runs import unserved, unserved_sizes
from hp_tool.errors import InputError, UnsupportedError


def check(request: ProfileRequest) -> None:
    """Raise UnsupportedError for what is not run, InputError for sizes that do not fit together."""
    for field, what in unprofiled(model=request.model, training=request.training):
        raise UnsupportedError(f"the profiler does not run {what}", field=field)
    for unsupported, what in (*unprofiled_sizes(request.parallel, model=request.model), _recompute(request.parallel)):
        if unsupported:
            raise UnsupportedError(f"the profiler does not run {what}", field="parallel")
    for wrong, message in _sizes(request):
        if wrong:
            raise InputError(message)


def check_serving(request: InferenceRequest) -> None:
    """The same for an inference run."""
    load, parallel = request.inference, request.parallel
    refused = (
        *unserved(model=request.model, inference=load, runner=request.runner),
        *unserved_sizes(model=request.model, inference=load, parallel=parallel),
    )
    for field, what in refused:
        raise UnsupportedError(f"the profiler does not serve {what}", field=field)
    if request.num_gpus != parallel.tensor_parallel_size:
        raise InputError(f"one replica of TP {parallel.tensor_parallel_size} is not num_gpus {request.num_gpus}")
    if min(request.repetitions, load.input_length, load.output_length) < 1 or request.warmup < 0:
        raise InputError("repetitions and lengths must be at least 1 and warmup at least 0")


def _recompute(parallel: ParallelConfig) -> tuple[bool, str]:
    name = recompute_name(parallel.recompute)
    return name.split()[0] not in ("none", "selective", "full") or name.startswith("selective "), f"recompute: {name}"


def _sizes(request: ProfileRequest) -> Iterator[tuple[bool, str]]:
    training, parallel = request.training, request.parallel
    t, p, d = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size
    batch = d * parallel.micro_batch_size
    yield t * p * d != request.num_gpus, f"TP {t} x PP {p} x DP {d} is not num_gpus {request.num_gpus}"
    yield training.global_batch_size % batch != 0, f"global_batch_size {training.global_batch_size} is not divisible by {batch}"
    yield request.steps < 1 or request.warmup_steps < 0, "steps must be at least 1 and warmup_steps at least 0"
