"""Check that the profiler supports a request, before building anything."""

from collections.abc import Iterator
from importlib.util import find_spec

from hp_tool.domain.measurement import ProfileRequest
from hp_tool.domain.parallel import ParallelConfig, recompute_name
from hp_tool.domain.profiling import (
    unsupported_serving,
    unsupported_serving_sizes,
    unsupported_sizes,
    unsupported_training,
)
from hp_tool.domain.requests import InferenceRequest
from hp_tool.domain.switches import (
    APEX,
    CUDA,
    DEEP_EP,
    ENGINE,
    Switches,
    drop_unavailable,
    megatron_switches,
)
from hp_tool.errors import InputError, UnsupportedError

_MODULES = {
    ENGINE: "transformer_engine",
    APEX: "fused_weight_gradient_mlp_cuda",
    DEEP_EP: "deep_ep",
}
"""Module that Megatron Core imports from each package."""


def supported_overlaps(request: ProfileRequest) -> tuple[Switches, dict[str, tuple[str, ...]]]:
    """Return the run's overlaps and fusions, and how they differ from the exported configuration.

    The differences give, for each changed field, what this host lacks.
    """
    parallel = request.parallel
    exported = megatron_switches(
        model=request.model,
        workload=request.training,
        parallel=parallel,
        dispatcher=parallel.moe_token_dispatcher_type or "alltoall",
        nvlink_domain_size=request.nvlink_domain_size,
    )
    missing_packages = [
        package
        for package, module in _MODULES.items()
        if request.gpu == "cpu" or find_spec(module) is None
    ]
    return drop_unavailable(
        exported, lacking=[*missing_packages, *([CUDA] if request.gpu == "cpu" else [])]
    )


def check_training(request: ProfileRequest) -> None:
    """Raise UnsupportedError for unsupported training, InputError for inconsistent sizes."""
    for field, what in unsupported_training(
        model=request.model, training=request.training, gpu=request.gpu
    ):
        raise UnsupportedError(f"The profiler does not support {what}.", field=field)
    parallel = request.parallel
    sizes = unsupported_sizes(
        parallel,
        model=request.model,
        training=request.training,
        gpu=request.gpu,
        communication=parallel.context_parallel_communication,
    )
    for unsupported, what in (*sizes, *_recompute(parallel, framework=request.training.framework)):
        if unsupported:
            raise UnsupportedError(f"The profiler does not support {what}.", field="parallel")
    has_engine = request.gpu != "cpu" and find_spec("transformer_engine") is not None
    for needs, what in _transformer_engine(request):
        if needs and not has_engine:
            raise UnsupportedError(
                f"The profiler does not support {what} without Transformer Engine.",
                field="parallel",
            )
    for wrong, message in _inconsistent_sizes(request):
        if wrong:
            raise InputError(message)


def check_serving(request: InferenceRequest) -> None:
    """Raise UnsupportedError or InputError for inference that the profiler cannot run."""
    load, parallel = request.inference, request.parallel
    unsupported = (
        *unsupported_serving(model=request.model, inference=load, runner=request.runner),
        *unsupported_serving_sizes(
            model=request.model, inference=load, parallel=parallel, runner=request.runner
        ),
    )
    for field, what in unsupported:
        raise UnsupportedError(f"The profiler does not serve {what}.", field=field)
    if request.runner != "endpoint" and request.num_gpus != parallel.tensor_parallel_size:
        raise InputError(
            f"num_gpus is {request.num_gpus}, but must equal tensor_parallel_size "
            f"{parallel.tensor_parallel_size}."
        )
    if min(request.repetitions, load.input_length, load.output_length) < 1 or request.warmup < 0:
        raise InputError(
            "repetitions, input_length and output_length must be at least 1, and warmup at least 0."
        )


def _recompute(parallel: ParallelConfig, *, framework: str) -> Iterator[tuple[bool, str]]:
    name = recompute_name(parallel.recompute)
    known = (
        ("none", "per_op", "per_layer")
        if framework == "torch-fsdp"
        else ("none", "selective", "full")
    )
    yield name.split()[0] not in known, f"recompute: {name}"


def _transformer_engine(request: ProfileRequest) -> Iterator[tuple[bool, str]]:
    parallel, training = request.parallel, request.training
    communication = parallel.context_parallel_communication or "p2p"
    yield training.precision == "fp8", "precision fp8"
    yield training.narrow_optimizer, "optimizer states in 16 bits"
    yield (
        parallel.context_parallel_size > 1 and communication != "all_gather",
        f"context parallelism by {communication}",
    )
    yield "moe_act" in recompute_name(parallel.recompute), "recomputation of moe_act"


def _inconsistent_sizes(request: ProfileRequest) -> Iterator[tuple[bool, str]]:
    training, parallel = request.training, request.parallel
    t, p, d = (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.data_parallel_size,
    )
    c, e = (
        parallel.context_parallel_size,
        parallel.expert_parallel_size * parallel.expert_tensor_parallel_size,
    )
    shards = parallel.data_parallel_shard_size or d
    yield d % shards != 0, f"DP {d} is not divisible by data_parallel_shard_size {shards}"
    batch = d * parallel.micro_batch_size
    yield (
        t * p * c * d != request.num_gpus,
        f"TP {t} x PP {p} x CP {c} x DP {d} is not num_gpus {request.num_gpus}",
    )
    yield (
        training.sequence_length % (2 * c if c > 1 else 1) != 0,
        f"sequence_length is not divisible by 2 x CP {c}",
    )
    yield t * c * d % e != 0, f"TP {t} x CP {c} x DP {d} is not divisible by expert groups of {e}"
    yield (
        (request.model.num_experts or e) % parallel.expert_parallel_size != 0,
        "num_experts is not divisible by EP",
    )
    yield (
        training.global_batch_size % batch != 0,
        f"global_batch_size {training.global_batch_size} is not divisible by {batch}",
    )
    yield (
        request.steps < 1 or request.warmup_steps < 0,
        "steps must be at least 1 and warmup_steps at least 0",
    )
