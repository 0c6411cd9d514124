"""Micro-benchmarks: operations to time, fits of kernel and link constants, and slow devices.

Each fit is robust least squares on log ratios. Its input is an operation's time at datasheet rates
in seconds, so the fitted constants are fractions of these rates. A fit returns the constants and
the relative error of each row.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.network import local_bandwidth
from hp_tool.domain.efficiency import GpuEfficiency, Link, Roofline
from hp_tool.domain.hardware import ClusterSpec, GpuSpec, Precision
from hp_tool.domain.measurement import Collective, LocalOperation, Operation, OperationTimes
from hp_tool.loop.assumptions import assumed

T = TypeVar("T")
ELEMENT_BYTES: dict[Precision, float] = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0}
_RING: dict[Collective, float] = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Number of times each byte of the buffer crosses a ring link, as a multiple of (n-1)/n.

It is 1 for all-gather and reduce-scatter, and 2 for all-reduce.
"""
_PASSES = {"add": 3.0, "activation": 5.0, "norm": 5.0, "loss": 4.0}
"""Number of tensors that a fused kernel must read or write.

`add` reads two tensors and writes one. Elementwise functions count forward and backward (x, y; x,
dy, dx). `loss` reads the logits and saves their softmax, then reads the softmax and writes the
gradient.
"""
_KERNELS = {"add": 1.0, "activation": 2.0, "norm": 2.0, "loss": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFit:
    """Constants fitted to a machine."""

    gpu: GpuEfficiency
    network: Link | None
    """Ring collectives across nodes; None if all ranks are on one node."""
    errors: dict[str, tuple[int, float]]
    """(number of operations, median relative error) of each fit on its own rows."""


def plan_operations(
    cluster: ClusterSpec, *, precisions: Sequence[Precision]
) -> tuple[Operation, ...]:
    """Return the operations to time on a cluster.

    Timing them takes a few minutes on GPUs and less on CPUs.
    """
    cpu = cluster.gpu.kind == "cpu"
    sizes = (64, 256, 768) if cpu else (1024, 4096, 8192)
    lengths = (64, 256, 512) if cpu else (1024, 4096, 8192)
    rows = (2**7, 2**11) if cpu else (2**11, 2**14)
    width = 256 if cpu else 4096
    operations: list[Operation] = []
    for precision in precisions:
        operations += [
            Operation(name="matmul", shape=shape, precision=precision)
            for shape in itertools.product(sizes, repeat=3)
        ]
        heads, dim = (4, 32) if cpu else (32, 128)
        shapes = [(b, s, heads, heads, dim) for b in (1, 4) for s in lengths]
        operations += [
            Operation(name="attention", shape=shape, precision=precision) for shape in shapes
        ]
        for count in rows:
            operations += [
                Operation(name=name, shape=(count * width,), precision=precision)
                for name in ("add", "activation")
            ]
            operations += [Operation(name="norm", shape=(count, width), precision=precision)]
            operations += [Operation(name="loss", shape=(count, 2 * width), precision="fp32")]
    return tuple(
        dict.fromkeys((*operations, *_collectives(cluster, precision=precisions[0], cpu=cpu)))
    )


def _collectives(cluster: ClusterSpec, *, precision: Precision, cpu: bool) -> Iterable[Operation]:
    """Return collectives in groups of every size that divides a node, and across all nodes.

    The latter have one device of each node.
    """
    node, nodes = cluster.gpus_per_node, cluster.num_nodes
    groups = [(n, 1) for n in range(2, node + 1) if node % n == 0]
    groups += [(nodes, node)] if nodes > 1 else []
    names: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    exponents = (10, 14, 17, 20, 22) if cpu else (16, 20, 24, 27, 30)
    for (size, stride), name, exponent in itertools.product(groups, names, exponents):
        yield Operation(
            name=name, shape=(2**exponent,), precision=precision, group_size=size, stride=stride
        )


def fit_machine(
    times: Sequence[OperationTimes], *, cluster: ClusterSpec, start: GpuEfficiency, fitted_on: str
) -> MachineFit:
    """Fit the constants of the cluster's devices and links.

    Constants without operations are those of `start`. Kernel times are the median over ranks.
    Collective times are those of the slowest rank, because all ranks wait for it.
    """
    gpu = cluster.gpu
    bounds = CPU if gpu.kind == "cpu" else GPU
    fits = _Fits(times=times, gpu=gpu, bounds=bounds)
    matmul = fits.matmuls()
    local = local_bandwidth(gpu)
    node_link = fits.link("inside a node", _RING, across=False, bandwidth=local)
    exchange = fits.link(
        "all-to-all inside a node", {"all_to_all": 1.0}, across=False, bandwidth=local
    )
    network = fits.link(
        "across nodes", _RING, across=True, bandwidth=cluster.inter_node_bandwidth_bytes_per_second
    )
    memory = fits.memory()
    constants = dataclasses.replace(
        start,
        gpu=gpu.name,
        matmul={**start.matmul, **matmul},
        attention=fits.attention() or start.attention,
        memory_fraction=memory[0] if memory else start.memory_fraction,
        kernel_overhead_s=memory[1] if memory else start.kernel_overhead_s,
        nvlink=node_link or start.nvlink,
        all_to_all=exchange or start.all_to_all,
        fitted_on=fitted_on,
        measured=True,
    )
    return MachineFit(gpu=constants, network=network, errors=fits.errors)


@dataclass(kw_only=True)
class _Fits:
    times: Sequence[OperationTimes]
    gpu: GpuSpec
    bounds: Bounds
    errors: dict[str, tuple[int, float]] = dataclasses.field(default_factory=dict)

    def matmuls(self) -> dict[Precision, Roofline]:
        """Fit a roofline for each precision."""
        rooflines: dict[Precision, Roofline] = {}
        for precision in dict.fromkeys(each.operation.precision for each in self._named("matmul")):
            rows = [each for each in self._named("matmul") if each.operation.precision == precision]
            m, n, k = _shapes(rows)
            traffic = ELEMENT_BYTES[precision] * (m * k + n * k + m * n)
            peak = self.gpu.peak_flops_per_second[precision]
            fit = fit_roofline(
                2 * m * n * k / peak,
                self._memory_s(traffic),
                _median_rank(rows),
                bounds=self.bounds,
            )
            rooflines[precision] = self._noted(f"matmul {precision}", fit)
        return rooflines

    def attention(self) -> Roofline | None:
        """Fit attention to all timed precisions together; the cost model has one constant for it.

        Causal attention computes half of the scores.
        """
        rows = self._named("attention")
        if not rows:
            return None
        b, s, heads, kv_heads, d = _shapes(rows)
        peak = np.array([self.gpu.peak_flops_per_second[each.operation.precision] for each in rows])
        element = np.array([ELEMENT_BYTES[each.operation.precision] for each in rows])
        traffic = element * b * s * d * (2 * heads + 2 * kv_heads)
        flops_s = 2 * b * heads * s**2 * d / peak
        fit = fit_additive_roofline(
            flops_s, self._memory_s(traffic), _median_rank(rows), bounds=self.bounds
        )
        return self._noted("attention", fit)

    def memory(self) -> tuple[float, float] | None:
        """Fit (fraction of memory bandwidth, seconds per kernel) to memory-bound operations."""
        rows = [each for each in self.times if each.operation.name in _PASSES]
        if not rows:
            return None
        elements = np.array([np.prod(each.operation.shape, dtype=float) for each in rows])
        element = np.array(
            [
                ELEMENT_BYTES[each.operation.precision] * _PASSES[each.operation.name]
                for each in rows
            ]
        )
        kernels = np.array([_KERNELS[each.operation.name] for each in rows])
        fit = fit_memory(
            self._memory_s(elements * element), kernels, _median_rank(rows), bounds=self.bounds
        )
        return self._noted("memory-bound kernels", fit)

    def link(
        self, what: str, travels: dict[Collective, float], *, across: bool, bandwidth: float
    ) -> Link | None:
        """Fit a link, inside or across nodes, to the collectives in `travels`."""
        rows = [
            each
            for each in self.times
            if each.operation.name in travels and (each.operation.stride > 1) == across
        ]
        if not rows:
            return None
        peers = np.array([float(each.operation.group_size) for each in rows])
        size = np.array([each.operation.shape[0] * travels[each.operation.name] for each in rows])  # type: ignore[index]
        seconds = np.array([max(each.seconds_per_rank) for each in rows])
        return self._noted(
            what,
            fit_link(peers, size * (peers - 1) / peers / bandwidth, seconds, bounds=self.bounds),
        )

    def _named(self, name: str) -> list[OperationTimes]:
        return [each for each in self.times if each.operation.name == name]

    def _memory_s(self, traffic: Floats) -> Floats:
        return traffic / self.gpu.memory_bandwidth_bytes_per_second

    def _noted(self, what: str, fit: tuple[T, Floats]) -> T:
        constants, errors = fit
        self.errors[what] = (len(errors), float(np.median(errors)))
        return constants


def _shapes(rows: Sequence[OperationTimes]) -> Floats:
    return np.array([each.operation.shape for each in rows], dtype=float).T


def _median_rank(rows: Sequence[OperationTimes]) -> Floats:
    return np.array([np.median(each.seconds_per_rank) for each in rows])


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Search ranges and start values for fractions and for overheads in seconds."""

    fraction: tuple[float, float, float]
    """(minimum, start, maximum)"""
    overhead_s: tuple[float, float, float]

    def of(self, kinds: str) -> tuple[list[float], list[float], list[float]]:
        """Return (start, minimum, maximum) of several constants.

        In `kinds`, `f` stands for a fraction and `o` for an overhead.
        """
        chosen = [self.fraction if kind == "f" else self.overhead_s for kind in kinds]
        low, start, high = zip(*chosen, strict=True)
        return list(start), list(low), list(high)


CPU = Bounds(fraction=(0.001, 0.5, 5.0), overhead_s=(1e-7, 1e-5, 1e-1))
"""Wide bounds for CPUs: datasheet rates are estimates, caches are faster than memory, and other
processes may share a core.
"""
GPU = Bounds(fraction=(0.05, 0.7, 1.5), overhead_s=(1e-7, 5e-6, 1e-3))


def robust_fit(
    residuals: Callable[[Floats], Floats], start: list[float], low: list[float], high: list[float]
) -> Floats:
    """Fit by least squares on log ratios. A soft-l1 loss limits the effect of outliers."""
    from scipy.optimize import least_squares

    constants: Floats = least_squares(
        residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.05, x_scale=start
    ).x
    return constants


def _fit(
    predicted_s: Callable[[Floats], Floats], seconds: Floats, *, kinds: str, bounds: Bounds
) -> tuple[Floats, Floats]:
    """Return the constants x and the relative error of each row for `predicted_s(x)`.

    See `Bounds.of` for `kinds`.
    """

    def residuals(x: Floats) -> Floats:
        return np.asarray(np.log(predicted_s(x) / seconds))

    x = robust_fit(residuals, *bounds.of(kinds))
    return x, np.asarray(np.abs(np.expm1(residuals(x))))


def fit_roofline(
    flops_s: Floats, bytes_s: Floats, seconds: Floats, *, bounds: Bounds
) -> tuple[Roofline, Floats]:
    """Fit t = overhead + max(FLOPs / (x peak), bytes / (y bandwidth))."""
    x, errors = _fit(
        lambda x: x[2] + np.maximum(flops_s / x[0], bytes_s / x[1]),
        seconds,
        kinds="ffo",
        bounds=bounds,
    )
    return _roofline(x), errors


def fit_additive_roofline(
    flops_s: Floats, bytes_s: Floats, seconds: Floats, *, bounds: Bounds
) -> tuple[Roofline, Floats]:
    """Fit t = overhead + FLOPs / (x peak) + bytes / (y bandwidth).

    This suits kernels that alternate between arithmetic and memory access, such as attention.
    """
    x, errors = _fit(
        lambda x: x[2] + flops_s / x[0] + bytes_s / x[1], seconds, kinds="ffo", bounds=bounds
    )
    return _roofline(x), errors


def fit_memory(
    bytes_s: Floats, kernels: Floats, seconds: Floats, *, bounds: Bounds
) -> tuple[tuple[float, float], Floats]:
    """Fit t = kernels * overhead + bytes / (x bandwidth).

    Returns:
        ((fraction of memory bandwidth, seconds per kernel), errors)
    """
    x, errors = _fit(lambda x: x[1] * kernels + bytes_s / x[0], seconds, kinds="fo", bounds=bounds)
    return (round_timing(x[0]), round_timing(x[1])), errors


def fit_link(
    peers: Floats, wire_s: Floats, seconds: Floats, *, bounds: Bounds
) -> tuple[Link, Floats]:
    """Fit t = latency + latency_per_peer (n - 1) + wire / (x bandwidth).

    With a single group size, the two latencies cannot be separated, so each gets half of their sum:
    a single message is half of the shortest ring.
    """
    apart = len(np.unique(peers)) > 1

    def predicted_s(x: Floats) -> Floats:
        latency = x[1] + x[2] * (peers - 1) if apart else x[1]
        return np.asarray(latency + wire_s / x[0])

    x, errors = _fit(predicted_s, seconds, kinds="foo" if apart else "fo", bounds=bounds)
    fixed, per_peer = (x[1], x[2]) if apart else (x[1] / 2, x[1] / 2 / (peers[0] - 1))
    link = Link(
        bandwidth_fraction=round_timing(x[0]),
        latency_s=round_timing(fixed),
        latency_per_peer_s=round_timing(per_peer),
        ramp_bytes=0.0,
    )
    return link, errors


def round_timing(value: float) -> float:
    """Round to four significant digits, which is the precision of timings."""
    return float(f"{value:.4g}")


def _roofline(x: Floats) -> Roofline:
    return Roofline(
        peak_fraction=round_timing(x[0]),
        bandwidth_fraction=round_timing(x[1]),
        overhead_s=round_timing(x[2]),
    )


_MAD_TO_SD = 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A device, link or node that is slower than its peers."""

    kind: Literal["node", "gpu", "link"]
    name: str
    slowdown: float
    """Time relative to the median time of the peers, as a median over operations."""
    operations: int


def find_outliers(times: Sequence[OperationTimes], *, hosts: Sequence[str]) -> tuple[Outlier, ...]:
    """Find slow devices from local operations, and slow links from collectives of few ranks.

    If every device of a node is slow, the node is reported. At least three peers are required.
    `hosts` contains the host name of each rank.
    """
    local = [
        each.seconds_per_rank for each in times if each.operation.name in get_args(LocalOperation)
    ]
    labels = [f"{host} rank {rank}" for rank, host in enumerate(hosts)]
    devices = _slow_columns("gpu", np.array(local, dtype=float), labels=labels)
    outliers: list[Outlier] = []
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, name in enumerate(hosts) if name == host]
        slow = [devices[rank] for rank in ranks if rank in devices]
        if len(slow) == len(ranks) and len(set(hosts)) > 1:
            slowdown = float(np.median([each.slowdown for each in slow]))
            slow = [dataclasses.replace(slow[0], kind="node", name=host, slowdown=slowdown)]
        outliers += slow
    return (*outliers, *_links(times, hosts=hosts))


def _links(times: Sequence[OperationTimes], *, hosts: Sequence[str]) -> Iterable[Outlier]:
    """Compare groups of the same shape.

    A group's collective is only as fast as its slowest link.
    """
    for size, stride in dict.fromkeys(
        (each.operation.group_size, each.operation.stride) for each in times
    ):
        if size == 1 or len(hosts) // size < 3:
            continue
        groups = group_ranks(len(hosts), size=size, stride=stride)
        rows = [
            [max(each.seconds_per_rank[rank] for rank in group) for group in groups]
            for each in times
            if (each.operation.group_size, each.operation.stride) == (size, stride)
        ]
        labels = [" - ".join(f"{hosts[rank]} rank {rank}" for rank in group) for group in groups]
        yield from _slow_columns("link", np.array(rows), labels=labels).values()


def group_ranks(world: int, *, size: int, stride: int) -> list[list[int]]:
    """Split `world` ranks into groups of `size` ranks at distance `stride`."""
    blocks = range(0, world, size * stride)
    return [
        list(range(first, first + size * stride, stride))
        for block in blocks
        for first in range(block, block + stride)
    ]


def _slow_columns(
    kind: Literal["gpu", "link"], seconds: Floats, *, labels: Sequence[str]
) -> dict[int, Outlier]:
    """Return the columns that are outliers in their median log ratio to the peers' median.

    The criterion is the median absolute deviation.
    """
    if seconds.size == 0 or seconds.shape[1] < 3:
        return {}
    ratios = np.median(np.log(seconds) - np.median(np.log(seconds), axis=1, keepdims=True), axis=0)
    middle = float(np.median(ratios))
    spread = _MAD_TO_SD * float(np.median(np.abs(ratios - middle)))
    figures = assumed().slow_devices
    limit = max(float(np.log(figures.least_slowdown)), figures.deviations * spread)
    far: list[int] = np.flatnonzero(ratios - middle > limit).tolist()
    slowdowns = {i: float(np.exp(ratios[i] - middle)) for i in far}
    return {
        i: Outlier(kind=kind, name=labels[i], slowdown=each, operations=len(seconds))
        for i, each in slowdowns.items()
    }
