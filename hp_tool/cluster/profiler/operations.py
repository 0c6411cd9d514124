"""Time single operations in plain torch, on all ranks at once."""

import statistics
from collections.abc import Callable

import torch
from torch import distributed
from torch.nn import functional

from hp_tool.cluster.profiler.backend import max_over_ranks, now
from hp_tool.domain.measurement import Operation, OperationTimes
from hp_tool.domain.requests import BenchmarkRequest
from hp_tool.errors import InputError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MIN_REPETITIONS, _MAX_REPETITIONS = 3, 200
Call = Callable[[], object]


def time_all(request: BenchmarkRequest, *, device: torch.device) -> tuple[OperationTimes, ...]:
    """Return the mean time of each operation on every rank, in seconds. All ranks must call it."""
    torch.manual_seed(request.seed)
    groups: dict[tuple[int, int], distributed.ProcessGroup] = {}
    times = []
    for operation in request.operations:
        call = _call(operation, groups=groups, device=device)
        seconds = _mean_seconds(call, device=device, budget_s=request.budget_s)
        per_rank: list[float] = [0.0] * distributed.get_world_size()
        distributed.all_gather_object(per_rank, seconds)
        times.append(OperationTimes(operation=operation, seconds_per_rank=tuple(per_rank)))
    return tuple(times)


def _mean_seconds(call: Call, *, device: torch.device, budget_s: float) -> float:
    """Return the mean time of several repetitions, in seconds. All ranks start together.

    All ranks run the same number of repetitions; otherwise a collective would hang. The mean is
    used instead of the median, because a training step is a sum of operations that includes slow
    ones.
    """
    _seconds(call, device=device)
    first = max_over_ranks(_seconds(call, device=device), device=device)
    repetitions = min(_MAX_REPETITIONS, max(_MIN_REPETITIONS, round(budget_s / max(first, 1e-9))))
    distributed.barrier()
    return statistics.fmean(_seconds(call, device=device) for _ in range(repetitions))


def _seconds(call: Call, *, device: torch.device) -> float:
    started = now(device)
    call()
    return now(device) - started


def _call(
    operation: Operation,
    *,
    groups: dict[tuple[int, int], distributed.ProcessGroup],
    device: torch.device,
) -> Call:
    if operation.precision not in _DTYPES:
        raise InputError(f"Operations support {', '.join(_DTYPES)}, not {operation.precision}.")
    factory = {"device": device, "dtype": _DTYPES[operation.precision]}
    shape = operation.shape
    match operation.name:
        case "matmul":
            m, n, k = shape
            x, w = torch.randn(m, k, **factory), torch.randn(n, k, **factory)
            return lambda: functional.linear(x, w)
        case "attention":
            return _attention(*shape, **factory)
        case "add":
            a, b = torch.randn(*shape, **factory), torch.randn(*shape, **factory)
            out = torch.empty_like(a)
            return lambda: torch.add(a, b, out=out)
        case "activation":
            return _both_passes(functional.gelu, torch.randn(*shape, **factory))
        case "norm":
            norm = torch.nn.LayerNorm(shape[1], **factory)
            return _both_passes(norm, torch.randn(*shape, **factory))
        case "loss":
            labels = torch.randint(shape[1], shape[:1], device=device)
            return _both_passes(
                lambda x: functional.cross_entropy(x, labels), torch.randn(*shape, **factory)
            )
    return _collective(operation, group=_group(operation, groups=groups), **factory)


def _attention(b: int, s: int, heads: int, kv_heads: int, head_dim: int, **factory: object) -> Call:
    query = torch.randn(b, heads, s, head_dim, **factory)
    key, value = (
        torch.randn(b, kv_heads, s, head_dim, **factory),
        torch.randn(b, kv_heads, s, head_dim, **factory),
    )
    grouped = heads != kv_heads
    return lambda: functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=grouped
    )


def _both_passes(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Call:
    """Return a callable that runs the forward and backward passes.

    The output gradient is allocated beforehand, so creating it is not timed.
    """
    x.requires_grad_()
    gradient = torch.ones_like(function(x).detach())

    def call() -> None:
        function(x).backward(gradient)
        x.grad = None

    return call


def _collective(
    operation: Operation, *, group: distributed.ProcessGroup, **factory: object
) -> Call:
    """Return a call of a collective whose full buffer has shape[0] bytes.

    The full buffer is the output of all_gather and the input of reduce_scatter.
    """
    size = distributed.get_world_size(group)
    count = operation.shape[0] // torch.empty((), **factory).element_size() // size * size
    full = torch.ones(count, **factory)
    shard = torch.ones(count // size, **factory)
    match operation.name:
        case "all_reduce":
            return lambda: distributed.all_reduce(full, group=group)
        case "all_gather":
            return lambda: distributed.all_gather_into_tensor(full, shard, group=group)
        case "reduce_scatter":
            return lambda: distributed.reduce_scatter_tensor(shard, full, group=group)
    received = torch.empty_like(full)
    return lambda: distributed.all_to_all_single(received, full, group=group)


def _group(
    operation: Operation, *, groups: dict[tuple[int, int], distributed.ProcessGroup]
) -> distributed.ProcessGroup:
    size, stride = operation.group_size, operation.stride
    if (size, stride) not in groups:
        world = distributed.get_world_size()
        if world % (size * stride):
            raise InputError(
                f"Groups of {size} ranks with stride {stride} do not divide {world} ranks."
            )
        for block in range(0, world, size * stride):
            for first in range(block, block + stride):
                ranks = list(range(first, first + size * stride, stride))
                group = distributed.new_group(ranks)
                if distributed.get_rank() in ranks:
                    groups[size, stride] = group
    return groups[size, stride]
