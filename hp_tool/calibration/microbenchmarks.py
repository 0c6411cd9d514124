"""Which operations tell a machine's constants, and the constants that their times tell."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hp_tool.calibration import kernel_fits
from hp_tool.calibration.kernel_fits import Bounds, Floats
from hp_tool.domain.efficiency import GpuEfficiency, Link, Roofline
from hp_tool.domain.hardware import ClusterSpec, GpuSpec, Precision
from hp_tool.domain.microbenchmark import Collective, Operation, OperationTimes

ELEMENT_BYTES: dict[Precision, float] = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0}
_RING: dict[Collective, float] = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Times each byte of the buffer travels the ring: S (n-1)/n for all-gather and reduce-scatter, twice that for all-reduce."""
_PASSES = {"add": 3.0, "activation": 5.0, "norm": 5.0, "loss": 4.0}
"""Tensors that a fused kernel must read or write: two in and one out; forward and backward of an elementwise function (x, y;
x, dy, dx); of a loss from logits (read, and its softmax kept; read, and the gradient written)."""
_KERNELS = {"add": 1.0, "activation": 2.0, "norm": 2.0, "loss": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFit:
    """What a machine was found to be."""

    gpu: GpuEfficiency
    network: Link | None
    """Ring collectives across nodes; None where all ranks share one."""
    errors: dict[str, tuple[int, float]]
    """(operations, median relative error) of each fit on its own rows."""


def plan_operations(cluster: ClusterSpec, *, precisions: Sequence[Precision]) -> tuple[Operation, ...]:
    """What to time on a cluster: a few minutes on GPUs, less on CPU processes."""
    cpu = cluster.gpu.kind == "cpu"
    sizes = (64, 256, 768) if cpu else (1024, 4096, 8192)
    lengths = (64, 256, 512) if cpu else (1024, 4096, 8192)
    rows = (2**7, 2**11) if cpu else (2**11, 2**14)
    width = 256 if cpu else 4096
    found: list[Operation] = []
    for precision in precisions:
        found += [Operation(name="matmul", shape=shape, precision=precision) for shape in itertools.product(sizes, repeat=3)]
        heads, dim = (4, 32) if cpu else (32, 128)
        shapes = [(b, s, heads, heads, dim) for b in (1, 4) for s in lengths]
        found += [Operation(name="attention", shape=shape, precision=precision) for shape in shapes]
        for count in rows:
            found += [Operation(name=name, shape=(count * width,), precision=precision) for name in ("add", "activation")]
            found += [Operation(name="norm", shape=(count, width), precision=precision)]
            found += [Operation(name="loss", shape=(count, 2 * width), precision="fp32")]
    return tuple(dict.fromkeys((*found, *_collectives(cluster, precision=precisions[0], cpu=cpu))))


def _collectives(cluster: ClusterSpec, *, precision: Precision, cpu: bool) -> Iterable[Operation]:
    """Groups inside a node of every size that divides it, and one across all nodes for each device of a node."""
    node, nodes = cluster.gpus_per_node, cluster.num_nodes
    groups = [(n, 1) for n in range(2, node + 1) if node % n == 0]
    groups += [(nodes, node)] if nodes > 1 else []
    names: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    exponents = (10, 14, 17, 20, 22) if cpu else (16, 20, 24, 27, 30)
    for (size, stride), name, exponent in itertools.product(groups, names, exponents):
        yield Operation(name=name, shape=(2**exponent,), precision=precision, group_size=size, stride=stride)


def fit_machine(times: Sequence[OperationTimes], *, cluster: ClusterSpec, start: GpuEfficiency, fitted_on: str) -> MachineFit:
    """Constants of the cluster's devices and links. What no operation tells is taken from `start`.

    Kernels of the median rank; collectives of the slowest, since nobody leaves one before it.
    """
    gpu = cluster.gpu
    bounds = kernel_fits.CPU if gpu.kind == "cpu" else kernel_fits.GPU
    fits = _Fits(times=times, gpu=gpu, bounds=bounds)
    matmul = fits.matmuls()
    local = gpu.nvlink_bandwidth_bytes_per_second or gpu.pcie_bandwidth_bytes_per_second
    node_link = fits.link("inside a node", _RING, across=False, bandwidth=local)
    exchange = fits.link("all-to-all inside a node", {"all_to_all": 1.0}, across=False, bandwidth=local)
    network = fits.link("across nodes", _RING, across=True, bandwidth=cluster.inter_node_bandwidth_bytes_per_second)
    memory = fits.memory()
    found = dataclasses.replace(
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
    return MachineFit(gpu=found, network=network, errors=fits.errors)


@dataclass(kw_only=True)
class _Fits:
    times: Sequence[OperationTimes]
    gpu: GpuSpec
    bounds: Bounds
    errors: dict[str, tuple[int, float]] = dataclasses.field(default_factory=dict)

    def matmuls(self) -> dict[Precision, Roofline]:
        """A roofline for each precision."""
        found: dict[Precision, Roofline] = {}
        for precision in dict.fromkeys(each.operation.precision for each in self._named("matmul")):
            rows = [each for each in self._named("matmul") if each.operation.precision == precision]
            m, n, k = _shapes(rows)
            traffic = ELEMENT_BYTES[precision] * (m * k + n * k + m * n)
            peak = self.gpu.peak_flops_per_second[precision]
            roof, errors = kernel_fits.fit_roofline(
                2 * m * n * k / peak, self._memory_s(traffic), _median_rank(rows), bounds=self.bounds
            )
            found[precision] = roof
            self._note(f"matmul {precision}", errors)
        return found

    def attention(self) -> Roofline | None:
        """Over all precisions timed: the cost model has one for all. Causal: half of the scores."""
        rows = self._named("attention")
        if not rows:
            return None
        b, s, heads, kv_heads, d = _shapes(rows)
        peak = np.array([self.gpu.peak_flops_per_second[each.operation.precision] for each in rows])
        element = np.array([ELEMENT_BYTES[each.operation.precision] for each in rows])
        traffic = element * b * s * d * (2 * heads + 2 * kv_heads)
        roof, errors = kernel_fits.fit_additive_roofline(
            2 * b * heads * s**2 * d / peak, self._memory_s(traffic), _median_rank(rows), bounds=self.bounds
        )
        self._note("attention", errors)
        return roof

    def memory(self) -> tuple[float, float] | None:
        """(share of memory bandwidth, seconds a kernel) of the operations that do little else than move memory."""
        rows = [each for each in self.times if each.operation.name in _PASSES]
        if not rows:
            return None
        elements = np.array([np.prod(each.operation.shape, dtype=float) for each in rows])
        element = np.array([ELEMENT_BYTES[each.operation.precision] * _PASSES[each.operation.name] for each in rows])
        kernels = np.array([_KERNELS[each.operation.name] for each in rows])
        found, errors = kernel_fits.fit_memory(
            self._memory_s(elements * element), kernels, _median_rank(rows), bounds=self.bounds
        )
        self._note("memory-bound kernels", errors)
        return found

    def link(self, what: str, travels: dict[Collective, float], *, across: bool, bandwidth: float) -> Link | None:
        """Collectives named in `travels`, inside nodes or across them."""
        rows = [each for each in self.times if each.operation.name in travels and (each.operation.stride > 1) == across]
        if not rows:
            return None
        peers = np.array([float(each.operation.group_size) for each in rows])
        size = np.array([each.operation.shape[0] * travels[each.operation.name] for each in rows])  # type: ignore[index]
        seconds = np.array([max(each.seconds_per_rank) for each in rows])
        link, errors = kernel_fits.fit_link(peers, size * (peers - 1) / peers / bandwidth, seconds, bounds=self.bounds)
        self._note(what, errors)
        return link

    def _named(self, name: str) -> list[OperationTimes]:
        return [each for each in self.times if each.operation.name == name]

    def _memory_s(self, traffic: Floats) -> Floats:
        return traffic / self.gpu.memory_bandwidth_bytes_per_second

    def _note(self, what: str, errors: Floats) -> None:
        self.errors[what] = (len(errors), float(np.median(errors)))


def _shapes(rows: Sequence[OperationTimes]) -> Floats:
    return np.array([each.operation.shape for each in rows], dtype=float).T


def _median_rank(rows: Sequence[OperationTimes]) -> Floats:
    return np.array([np.median(each.seconds_per_rank) for each in rows])
