"""Measure this machine's `cpu` constants, one process with one thread: `python -m
benchmarks.accuracy.fit_cpu` (needs torch).

Writes hp_tool/catalog/data/efficiency/silicon/cpu.yaml: matmuls, an elementwise kernel, and gloo
collectives between two processes over loopback. Fractions are of the catalogue's `cpu` entry.
Searches correct what differs on another host.
"""

from __future__ import annotations

import datetime
import itertools
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from benchmarks.accuracy.fit_gpus import fit_times
from benchmarks.accuracy.fitting import Floats, rounded
from evidence.fitted_file import FittedFile
from hp_tool.catalog import gpu
from hp_tool.domain.hardware import Precision
from hp_tool.loop.calibration.microbenchmarks import CPU, fit_memory, fit_roofline

COMMAND = "python -m benchmarks.accuracy.fit_cpu"
WORLD = 2
SIZES = (64, 128, 256, 512, 1024)
LINK_BYTES = tuple(2**k for k in range(14, 25, 2))


def seconds_of(call: Callable[[], object], *, budget_s: float = 0.03) -> float:
    """Median seconds of one call, repeated for about `budget_s`."""
    call()
    times: list[float] = []
    while sum(times) < budget_s or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def measure_matmul(precision: Precision) -> tuple[Floats, Floats]:
    """(m, n, k) rows and seconds of x[m,k] w[n,k]^T."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    shapes, seconds = [], []
    for m, n, k in itertools.product(SIZES, SIZES, SIZES):
        x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        shapes.append((m, n, k))
        seconds.append(seconds_of(lambda x=x, w=w: torch.nn.functional.linear(x, w)))
    return np.array(shapes, dtype=float), np.array(seconds)


def fit_matmul(precision: Precision) -> dict[str, float]:
    device = gpu("cpu")
    shapes, seconds = measure_matmul(precision)
    m, n, k = shapes.T
    size = 4.0 if precision == "fp32" else 2.0
    flops = 2 * m * n * k / device.peak_flops_per_second[precision]
    traffic = size * (m * k + n * k + m * n) / device.memory_bandwidth_bytes_per_second
    roofline, errors = fit_roofline(flops, traffic, seconds, bounds=CPU)
    print(
        f"matmul {precision}: {roofline}, median error {np.median(errors):.1%} over {len(seconds)} "
        "shapes"
    )
    return asdict(roofline)


def fit_elementwise() -> tuple[float, float]:
    """(fraction of memory bandwidth, seconds a kernel) of adding two tensors too large for the
    caches.
    """
    import torch

    counts = 2 ** np.arange(16, 25, 2)
    seconds = []
    for count in counts:
        a, b = torch.randn(int(count)), torch.randn(int(count))
        out = torch.empty_like(a)
        seconds.append(seconds_of(lambda a=a, b=b, out=out: torch.add(a, b, out=out)))
    traffic = 12.0 * counts / gpu("cpu").memory_bandwidth_bytes_per_second
    (fraction, overhead), _ = fit_memory(
        traffic, np.ones(len(counts)), np.array(seconds), bounds=CPU
    )
    print(f"elementwise: {fraction:.3f} of memory bandwidth, {overhead * 1e6:.1f} us a kernel")
    return fraction, overhead


def _rank(rank: int, port: int, results: object) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    for size in LINK_BYTES:
        tensor = torch.ones(size // 4)
        times = []
        for _ in range(12):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - start)
        if rank == 0:
            results[size] = float(np.median(times[2:]))  # type: ignore[index]
    dist.destroy_process_group()


def fit_link() -> dict[str, float]:
    """All-reduce between two processes."""
    import socket

    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_rank, args=(port, results), nprocs=WORLD)
        medians = dict(results)
    wire = np.array([2.0 * size * (WORLD - 1) / WORLD for size in medians])
    bandwidth = gpu("cpu").pcie_bandwidth_bytes_per_second

    def predicted_s(bandwidth_fraction: float, latency_s: float) -> Floats:
        return latency_s + wire / (bandwidth_fraction * bandwidth)

    free = {"bandwidth_fraction": (0.3, 0.001, 2.0), "latency_s": (1e-4, 1e-6, 1e-1)}
    link = rounded(fit_times("all-reduce", predicted_s, np.array(list(medians.values())), **free))
    return link | {"latency_per_peer_s": link["latency_s"], "ramp_bytes": 0.0}


def main() -> None:
    import torch

    torch.set_num_threads(1)
    memory_fraction, kernel_overhead_s = fit_elementwise()
    matmul = {precision: fit_matmul(precision) for precision in ("bf16", "fp32")}
    link = fit_link()
    FittedFile(
        file="silicon/cpu.yaml",
        fields={
            "gpu": "cpu",
            "matmul": matmul,
            "attention": matmul["bf16"],
            "memory_fraction": memory_fraction,
            "kernel_overhead_s": kernel_overhead_s,
            "context_bytes": 0.0,
            "nvlink": link,
            "all_to_all": link,
            "fitted_on": f"torch {torch.__version__}, one thread of a {platform.machine()} host "
            f"with {os.cpu_count()} cores, "
            f"gloo over loopback, {datetime.datetime.now(datetime.UTC).date()}, by {COMMAND}",
        },
    ).write(command=COMMAND)


if __name__ == "__main__":
    main()
