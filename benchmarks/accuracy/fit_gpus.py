"""Fit the kernel and collective constants of each die to isolated measurements: `python -m
evidence.fit --only gpus`.

Writes hp_tool/catalog/data/efficiency/silicon/*.yaml, each fitted to all measured cards of a die. A
file has a roofline of three constants for each matmul precision, once for training shapes and once
for all shapes; one roofline each for fused attention and for decoding; and four constants each for
ring collectives, all-to-all and small all-reduces. These fits use no complete training or serving
run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.accuracy.data import Row
from benchmarks.accuracy.fitting import Floats, fit_settings, rounded
from benchmarks.accuracy.timed_kernels import (
    PRECISIONS,
    SYSTEMS,
    fit_experts,
    fit_times,
    medians,
    memory_bandwidth,
    peak,
    timed_rows,
)
from evidence.fitted_file import FittedFile
from hp_tool.catalog import gpu
from hp_tool.cost.network import local_bandwidth
from hp_tool.domain.hardware import GpuSpec, Precision
from hp_tool.loop.calibration.microbenchmarks import Bounds, fit_additive_roofline, round_timing

COMMAND = "python -m evidence.fit --only gpus"
MIXERS_FITTED_ON = (
    "; mixers: ops/gdn.csv, kda.csv, mamba2.csv and dsa.csv, by python -m "
    "evidence.fit --only mixers"
)

GIVEN = fit_settings("gpus")
INPUT_BYTES = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5}
ATTENTION = Bounds(fraction=(0.05, 0.6, 1.2), overhead_s=(1e-6, 1e-5, 1e-4))
ROOFLINE = ("peak_fraction", "bandwidth_fraction", "overhead_s")
RING_SHARE = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "alltoall": 1.0}


def fit_matmul(
    rows: list[Row], die: str, precision: Precision
) -> tuple[dict[str, float], dict[str, float]]:
    """Return (constants of matmuls in training, constants over all shapes).

    All shapes determine the bandwidth, because only thin shapes are bound by it. Shapes with m >=
    1024 determine peak and overhead, so the overhead includes the fixed costs of a large kernel:
    launch, prologue and an incomplete last wave. Narrow matmuls were timed together with the
    quantisation of x, which moves m k elements through memory. The number of passes is fitted and
    then removed, because the training cost model charges casts separately.
    """
    (m, n, k), seconds, cards = medians(rows, ("m", "n", "k"))
    flops, bandwidth = 2 * m * n * k / peak(cards, precision), memory_bandwidth(cards)
    traffic = (INPUT_BYTES[precision] * (m * k + n * k) + 2 * m * n) / bandwidth
    quantised = 0.0 if precision == "bf16" else 3.0 * m * k / bandwidth

    def predicted_s(
        peak_fraction: float, bandwidth_fraction: float, overhead_s: float, passes: float = 0.0
    ) -> Floats:
        arithmetic, memory = flops / peak_fraction, traffic / bandwidth_fraction
        return np.asarray(overhead_s + np.maximum(arithmetic, memory) + passes * quantised)

    title = f"{die:10} matmul {precision:6}"
    free, passes = GIVEN["matmul"], GIVEN["passes"]
    ends = {name: free[name] for name in ("peak_fraction", "overhead_s")}
    everywhere = fit_times(f"{title} all", predicted_s, seconds, **free, passes=passes)
    large, reach = m >= 1024, {"bandwidth_fraction": everywhere["bandwidth_fraction"]}
    training = fit_times(
        f"{title} large",
        lambda **x: predicted_s(**reach, **x)[large],
        seconds[large],
        **ends,
        passes=passes,
    )
    every = fit_times(f"{title} as timed", predicted_s, seconds, **free)
    return rounded({name: (training | reach)[name] for name in ROOFLINE}), rounded(every)


def fit_thin(by_precision: dict[Precision, list[Row]], die: str) -> dict[str, dict[str, float]]:
    """Return the constants of matmuls in serving, fitted to all shapes: one bandwidth, one launch
    time and one cast for all precisions of a die, and one peak for each precision.

    A call takes at most as long as the same call with more rows, because it could be padded to
    them. Some libraries' kernels for a single row, and some disturbed timings, take several times
    as long.
    """
    data = {precision: _shortest(rows) for precision, rows in by_precision.items()}

    def predicted_s(
        bandwidth_fraction: float,
        overhead_s: float,
        depth_s: float,
        sharpness: float,
        cast_s: float,
        cast_passes: float,
        **peaks: float,
    ) -> Floats:
        times = []
        for precision, ((m, n, k), _, cards) in data.items():
            element, memory = INPUT_BYTES[precision], bandwidth_fraction * memory_bandwidth(cards)
            compute = 2 * m * n * k / peak(cards, precision) / peaks[precision]
            traffic = (element * (m * k + n * k) + 2 * m * n) / memory
            time = (
                overhead_s
                + depth_s * k
                + (compute**sharpness + traffic**sharpness) ** (1 / sharpness)
            )
            if element < 2.0:
                time = time + cast_s + cast_passes * (2.0 + element) * m * k / memory
            times.append(time)
        return np.concatenate(times)

    seconds = np.concatenate([times for _, times, _ in data.values()])
    free, peaks = GIVEN["thin"], dict.fromkeys(data, GIVEN["matmul"]["peak_fraction"])
    values = rounded(fit_times(f"{die:10} thin matmuls", predicted_s, seconds, **free, **peaks))
    shared = {name: values[name] for name in free}
    uncast = {name: value for name, value in shared.items() if not name.startswith("cast_")}
    return {
        each: {"peak_fraction": values[each]} | (shared if INPUT_BYTES[each] < 2.0 else uncast)
        for each in data
    }


def _shortest(rows: list[Row]) -> tuple[Floats, Floats, list[GpuSpec]]:
    """Return `medians` by m, n and k, each limited to the time of the same call with more rows."""
    shapes, seconds, cards = medians(rows, ("m", "n", "k"))
    calls = list(zip(*shapes[1:], (card.name for card in cards), strict=True))
    least: dict[tuple[object, ...], float] = {}
    shortest = seconds.copy()
    for i in np.argsort(-shapes[0]):
        shortest[i] = least[calls[i]] = min(seconds[i], least.get(calls[i], np.inf))
    return shapes, shortest, cards


def fit_attention(rows: list[Row], die: str) -> dict[str, float]:
    """Return the constants of causal prefill: half of the FLOPs of full attention; memory traffic
    and arithmetic add up.
    """
    (b, s, a, k, d), seconds, cards = medians(
        rows, ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim")
    )
    flops = 2 * b * a * s**2 * d / peak(cards, "bf16")
    traffic = 2 * b * s * d * (2 * a + 2 * k) / memory_bandwidth(cards)
    kernel, errors = fit_additive_roofline(flops, traffic, seconds, bounds=ATTENTION)
    print(
        f"{die:10} attention: {kernel}; {len(errors)} shapes, median error {np.median(errors):.1%}"
    )
    return asdict(kernel)


def fit_decode_attention(rows: list[Row], die: str) -> dict[str, float]:
    """Return the constants of decoding one token over step + 1 cached tokens: the bytes of keys and
    values, and a fixed cost. Every query head of a group reads the same keys, so arithmetic stays
    far below the peak, which is set to the prefill kernel's.
    """
    (b, step, _, k, d), seconds, cards = medians(
        rows, ("batch_size", "step", "num_heads", "num_key_value_heads", "head_dim")
    )
    traffic = 4 * b * (step + 1) * k * d / memory_bandwidth(cards)

    def predicted_s(bandwidth_fraction: float, overhead_s: float) -> Floats:
        return np.asarray(overhead_s + traffic / bandwidth_fraction)

    title = f"{die:10} decode attention"
    return rounded(fit_times(title, predicted_s, seconds, **GIVEN["decode"]))


def fit_small_all_reduce(rows: list[Row], die: str) -> dict[str, float]:
    """Return the constants of the one-kernel all-reduces that engines capture in CUDA graphs, up to
    8 MiB, fitted to medians over the libraries.
    """
    kernels = [
        r
        for r in rows
        if r["kernel_source"] != "vLLM_custom_eager" and float(r["message_size"]) <= 2**22
    ]
    (n, elements), seconds, cards = medians(kernels, ("num_gpus", "message_size"))
    return ring(
        f"{die:10} small all-reduce",
        n,
        2 * 2 * elements * (n - 1) / n,
        seconds,
        cards,
        **GIVEN["small_all_reduce"],
    )


def fit_link(rows: list[Row], die: str, operations: tuple[str, ...]) -> dict[str, float]:
    """Return the constants of collectives of 256 KiB and more inside one NVLink domain;
    message_size counts elements of 2 bytes.
    """
    chosen = [
        r
        for r in rows
        if r["op_name"] in operations
        and float(r["message_size"]) >= 2**17
        and float(r["num_gpus"]) <= 8
    ]
    n = np.array([float(r["num_gpus"]) for r in chosen])
    size = np.array([2 * float(r["message_size"]) for r in chosen])
    wire = size * (n - 1) / n * np.array([RING_SHARE[r["op_name"]] for r in chosen])
    seconds = np.array([float(r["latency_ms"]) * 1e-3 for r in chosen])
    return ring(
        f"{die:10} {'+'.join(operations)}",
        n,
        wire,
        seconds,
        [gpu(SYSTEMS[r["system"]]) for r in chosen],
        **GIVEN["link"],
    )


def ring(
    title: str,
    ranks: Floats,
    wire: Floats,
    seconds: Floats,
    cards: list[GpuSpec],
    **free: Sequence[float],
) -> dict[str, float]:
    """Return the constants of a link over which each rank sends `wire` bytes."""
    bandwidth = np.array([local_bandwidth(card) for card in cards])

    def predicted_s(
        bandwidth_fraction: float,
        latency_s: float,
        latency_per_peer_s: float,
        ramp_bytes: float = 0.0,
    ) -> Floats:
        moved = (wire + np.sqrt(wire * ramp_bytes)) / (bandwidth_fraction * bandwidth)
        return np.asarray(latency_s + latency_per_peer_s * (ranks - 1) + moved)

    found = rounded(fit_times(title, predicted_s, seconds, **free))
    return found | {"ramp_bytes": found.get("ramp_bytes", 0.0)}


def fit_die(folder: Path, die: str) -> dict[str, object]:
    """Fit all constants of one die."""
    systems = [system for system, card in SYSTEMS.items() if gpu(card).silicon == die]
    of_die = {
        name: [row for row in timed_rows(folder, name) if row["system"] in systems]
        for name in (
            "gemm",
            "context_attention",
            "nccl",
            "generation_attention",
            "custom_allreduce",
            "moe",
        )
    }
    wide = [row for row in of_die["gemm"] if float(row["n"]) >= 1024 and float(row["k"]) >= 1024]
    matmuls = {
        PRECISIONS[kind]: [r for r in wide if r["gemm_dtype"] == kind]
        for kind in dict.fromkeys(r["gemm_dtype"] for r in wide)
    }
    fits = {precision: fit_matmul(rows, die, precision) for precision, rows in matmuls.items()}
    elementwise = fits["bf16"][1]
    attention = fit_attention(of_die["context_attention"], die)
    decode = fit_decode_attention(of_die["generation_attention"], die)
    small = (
        {"small_all_reduce": fit_small_all_reduce(of_die["custom_allreduce"], die)}
        if of_die["custom_allreduce"]
        else {}
    )
    return {
        "gpu": die,
        "matmul": {precision: fit[0] for precision, fit in fits.items()},
        "attention": attention,
        "memory_fraction": elementwise["bandwidth_fraction"],
        "kernel_overhead_s": elementwise["overhead_s"],
        "context_bytes": GIVEN["context_bytes"],
        "nvlink": fit_link(of_die["nccl"], die, ("all_gather", "reduce_scatter", "all_reduce")),
        "all_to_all": fit_link(of_die["nccl"], die, ("alltoall",)),
        "thin_matmul": fit_thin(matmuls, die),
        **({"grouped_matmul": fit_experts(of_die["moe"], die)} if of_die["moe"] else {}),
        "decode_attention": {"peak_fraction": attention["peak_fraction"], **decode},
        **small,
        "fitted_on": f"ops/*.csv, systems {', '.join(systems)}, "
        f"by {COMMAND}; memory_fraction and kernel_overhead_s are those of matmuls of all shapes",
    }


def with_b200(later: dict[str, object], earlier: dict[str, object]) -> dict[str, object]:
    """Return B300's constants, completed with B200's where B300 was not timed.

    Small all-reduces were not timed, and the links of both cards are the same. vLLM's nvfp4 matmuls
    reach 4.9 and 4.5 PFLOP/s on B200 and B300, although B300's tensor cores are 1.5x faster;
    serving runs these kernels. Training calls cuBLAS, for which B200's fraction of the peak is
    assumed.
    """
    matmul = {**later["matmul"], "nvfp4": earlier["matmul"]["nvfp4"]}  # type: ignore[dict-item, index]
    return {
        **later,
        "matmul": matmul,
        "small_all_reduce": earlier["small_all_reduce"],
        "fitted_on": f"{later['fitted_on']}; nvfp4 of training and small_all_reduce as b200",
    }


def generic(fitted: list[dict[str, object]]) -> dict[str, object]:
    """Return geometric means over the fitted dies, as constants of unmeasured dies."""

    def mean(values: list[object]) -> object:
        if isinstance(values[0], dict):
            shared = set.intersection(*(set(value) for value in values))
            return {
                key: mean([value[key] for value in values]) for key in values[0] if key in shared
            }
        return round_timing(float(np.exp(np.mean(np.log(np.maximum(values, 1e-12))))))

    numbers = [
        {key: value for key, value in one.items() if key not in ("gpu", "fitted_on")}
        for one in fitted
    ]
    names = ", ".join(str(one["gpu"]) for one in fitted)
    return {
        "gpu": "generic",
        **mean(numbers),
        "measured": False,
        "fitted_on": f"geometric means over {names}",
    }


def fitted(folder: Path) -> Iterator[FittedFile]:
    dies = dict.fromkeys(str(gpu(card).silicon) for card in SYSTEMS.values())
    fitted = {die: fit_die(folder, die) for die in dies}
    fitted["b300"] = with_b200(fitted["b300"], fitted["b200"])
    fitted["generic"] = generic([fitted[die] for die in GIVEN["typical"]])
    for die, origin in GIVEN["borrowed"].items():
        fitted[die] = fitted[origin] | {
            "gpu": die,
            "measured": False,
            "fitted_on": f"nobody measured it: as {origin}",
        }
    for name, constants in fitted.items():
        known = GIVEN["attention_kernels"].get(name, {})
        kernels = {kernel: round_timing(over / under) for kernel, (over, under) in known.items()}
        yield FittedFile(
            file=f"silicon/{name}.yaml",
            fields=constants
            | {
                "fitted_on": f"{constants['fitted_on']}{MIXERS_FITTED_ON}",
                "attention_kernels": kernels,
            },
            keeps=("mixers",),
        )
