"""Fit each die's kernel and collective constants on isolated measurements: `python -m benchmarks.accuracy.fit_gpus --data DIR`.

Writes hp_tool/catalog/data/efficiency/silicon/*.yaml, each over all measured cards of a die: a roofline of three constants per
matmul precision for training shapes and one for all shapes, one each for fused attention and for decoding, and four constants
each for ring collectives, all-to-all and small all-reduces. Nothing of a whole training or serving run is read here.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import hp_tool
from benchmarks.accuracy.data import Row, add_data_argument, data_folder, read, write_constants
from hp_tool.calibration.microbenchmarks import Bounds, fit_additive_roofline, robust_fit, short
from hp_tool.catalog import gpu
from hp_tool.cost.network import local_bandwidth
from hp_tool.domain.hardware import GpuSpec, Precision

Floats = NDArray[np.float64]

SYSTEMS = {"a100_sxm": "a100-sxm-80gb", "h100_sxm": "h100-sxm-80gb", "h200_sxm": "h200-sxm-141gb", "b200_sxm": "b200-sxm-180gb",
           "b300_sxm": "b300-sxm-288gb"}  # fmt: skip
BORROWED = {"v100": "generic", "mi300x": "generic", "mi355x": "generic"}
"""Dies that nobody measured, and whose constants they get: those typical of all."""
TYPICAL = ("a100", "h100", "b200")
"""Dies that typical constants are means over, one a generation."""
PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}
INPUT_BYTES = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5}
CONTEXT_BYTES = float(2**30)
"""Driver context, NCCL buffers and library workspaces: a typical figure, half a GiB for the context alone; not fitted."""
OUTPUT = Path(hp_tool.__file__).parent / "catalog/data/efficiency/silicon"
ATTENTION = Bounds(fraction=(0.05, 0.6, 1.2), overhead_s=(1e-6, 1e-5, 1e-4))
KERNELS = {
    "h100": {"fa3": 1.0, "fa2": 616 / 335, "cudnn": 616 / 539, "triton": 616 / 378},
    "a100": {"fa2": 1.0},
    "b200": {"cudnn": 1.0},
    "b300": {"cudnn": 1.0},
    "mi300x": {"fa2": 1.0},
    "mi355x": {"fa2": 1.0},
    "generic": {"fa2": 1.0},
}
"""By die: seconds of named attention kernels over those of the one in ops/. H100: TFLOP/s of arXiv 2407.08608, figure 5
(causal forward, heads of 128, 16k tokens), whose FlashAttention 3 is vLLM's in ops/. A100: vLLM's is FlashAttention 2;
Blackwell: NVIDIA's own, of TensorRT-LLM. AMD's dies and others: the only one there is."""
RING_SHARE = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "alltoall": 1.0}


def timed(folder: Path, name: str) -> list[Row]:
    """Rows of one kind of operation; B300's stand in a file of their own, and not all kinds were timed on it."""
    later = f"{name}_b300.csv"
    return read(folder / "ops", f"{name}.csv") + (read(folder / "ops", later) if (folder / "ops" / later).is_file() else [])


def medians(rows: list[Row], keys: tuple[str, ...]) -> tuple[Floats, Floats, list[GpuSpec]]:
    """(shapes (keys, n), seconds (n,), cards): the median over kernels and repeats of each shape on each card of a die."""
    grouped: dict[tuple[str, tuple[float, ...]], list[float]] = defaultdict(list)
    for row in rows:
        grouped[row["system"], tuple(float(row[key]) for key in keys)].append(float(row["latency_ms"]) * 1e-3)
    shapes = np.array([shape for _, shape in grouped])
    return shapes.T, np.array([np.median(times) for times in grouped.values()]), [gpu(SYSTEMS[name]) for name, _ in grouped]


def memory_bandwidth(cards: list[GpuSpec]) -> Floats:
    return np.array([card.memory_bandwidth_bytes_per_second for card in cards])


def peak(cards: list[GpuSpec], precision: Precision) -> Floats:
    return np.array([card.peak_flops_per_second[precision] for card in cards])


def peer_bandwidth(cards: list[GpuSpec]) -> Floats:
    return np.array([local_bandwidth(card) for card in cards])


def fit_matmul(rows: list[Row], die: str, precision: Precision) -> tuple[dict[str, float], dict[str, float]]:
    """(constants of a training run's matmuls, the same over all shapes).

    Bandwidth comes from all shapes: only thin ones are bound by it. Peak and overhead come from m >= 1024, so that the
    overhead holds what a large kernel pays once: launch, prologue and an incomplete last wave. Narrow matmuls were timed
    together with the quantisation of x, m k elements in passes over memory; their number is fitted and left out here,
    because training's cost model counts casts apart.
    """
    (m, n, k), seconds, cards = medians(rows, ("m", "n", "k"))
    flops, bandwidth = 2 * m * n * k / peak(cards, precision), memory_bandwidth(cards)
    traffic = (INPUT_BYTES[precision] * (m * k + n * k) + 2 * m * n) / bandwidth
    quantised = 0.0 if precision == "bf16" else 3.0 * m * k / bandwidth

    def residuals(x: Floats) -> Floats:
        return np.log((x[2] + np.maximum(flops / x[0], traffic / x[1]) + x[3] * quantised) / seconds)

    everywhere = robust_fit(residuals, [0.7, 0.7, 5e-6, 1.0], [0.05, 0.05, 1e-7, 0.0], [1.2, 1.2, 1e-4, 10.0])
    large = m >= 1024

    def of_large(x: Floats) -> Floats:
        return residuals(np.array([x[0], everywhere[1], x[1], x[2]]))[large]

    reached, overhead, passes = robust_fit(of_large, [0.7, 5e-6, 1.0], [0.05, 1e-7, 0.0], [1.2, 1e-4, 10.0])
    errors = np.abs(np.expm1(of_large(np.array([reached, overhead, passes]))))
    print(
        f"{die:16} matmul {precision:6} peak {reached:.3f} bandwidth {everywhere[1]:.3f} "
        f"overhead {overhead * 1e6:.1f} us, {passes:.1f} passes; {large.sum()} shapes, "
        f"median error {np.median(errors):.1%}, mean {errors.mean():.1%}"
    )

    def of_all(x: Floats) -> Floats:
        return residuals(np.array([*x, 0.0]))

    every = robust_fit(of_all, [0.7, 0.7, 5e-6], [0.05, 0.05, 1e-7], [1.2, 1.2, 1e-4])
    return roofline(reached, everywhere[1], overhead), roofline(*every)


THIN = {"bandwidth_fraction": (0.7, 0.05, 1.2), "overhead_s": (4e-6, 1e-7, 1e-4), "depth_s": (1e-10, 0.0, 1e-8),
        "sharpness": (3.0, 1.0, 20.0), "cast_s": (4e-6, 0.0, 1e-4), "cast_passes": (1.0, 0.0, 10.0)}  # fmt: skip
"""Start and bounds of a ThinRoofline's constants that a die's precisions share."""


def fit_thin(by_precision: dict[Precision, list[Row]], die: str) -> dict[str, dict[str, float]]:
    """Constants of serving's matmuls, of all shapes: one bandwidth, one launch and one cast for all precisions of a die, and
    each precision's peak.

    A call takes at most as long as the same one with more rows, to which it could be padded: some libraries' kernels of one
    row, and single timings that were disturbed, take several times as long.
    """
    data = {precision: _shortest(rows) for precision, rows in by_precision.items()}
    precisions = list(data)

    def log_ratios(x: Floats, precision: Precision) -> Floats:
        (m, n, k), seconds, cards = data[precision]
        bandwidth, overhead, depth, sharpness, cast, passes = x[: len(THIN)]
        element, memory = INPUT_BYTES[precision], bandwidth * memory_bandwidth(cards)
        compute = 2 * m * n * k / peak(cards, precision) / x[len(THIN) + precisions.index(precision)]
        traffic = (element * (m * k + n * k) + 2 * m * n) / memory
        time = overhead + depth * k + (compute**sharpness + traffic**sharpness) ** (1 / sharpness)
        if element < 2.0:
            time = time + cast + passes * (2.0 + element) * m * k / memory
        return np.log(time / seconds)

    start, low, high = (list(column) + [value] * len(data) for column, value in
                        zip(zip(*THIN.values(), strict=True), (0.7, 0.05, 1.2), strict=True))  # fmt: skip
    x = robust_fit(lambda x: np.concatenate([log_ratios(x, each) for each in precisions]), start, low, high)
    shared = dict(zip(THIN, (short(value) for value in x), strict=False))
    for precision in precisions:
        errors = np.abs(np.expm1(log_ratios(x, precision)))
        print(f"{die:16} thin matmul {precision:6} {len(errors)} shapes, median error {np.median(errors):.1%}, "
              f"mean {errors.mean():.1%}")  # fmt: skip
    uncast = {name: value for name, value in shared.items() if not name.startswith("cast_")}
    return {each: {"peak_fraction": short(x[len(THIN) + i])} | (shared if INPUT_BYTES[each] < 2.0 else uncast)
            for i, each in enumerate(precisions)}  # fmt: skip


def _shortest(rows: list[Row]) -> tuple[Floats, Floats, list[GpuSpec]]:
    """Return `medians` of m, n and k, each time at most that of the same call with more rows."""
    shapes, seconds, cards = medians(rows, ("m", "n", "k"))
    calls = list(zip(*shapes[1:], (card.name for card in cards), strict=True))
    least: dict[tuple[object, ...], float] = {}
    shortest = seconds.copy()
    for i in np.argsort(-shapes[0]):
        shortest[i] = least[calls[i]] = min(seconds[i], least.get(calls[i], np.inf))
    return shapes, shortest, cards


def fit_attention(rows: list[Row], die: str) -> dict[str, float]:
    """Causal prefill: half of the full attention's FLOPs; memory traffic and arithmetic add up."""
    (b, s, a, k, d), seconds, cards = medians(rows, ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim"))
    flops = 2 * b * a * s**2 * d / peak(cards, "bf16")
    traffic = 2 * b * s * d * (2 * a + 2 * k) / memory_bandwidth(cards)
    found, errors = fit_additive_roofline(flops, traffic, seconds, bounds=ATTENTION)
    print(f"{die:16} attention     {found}; {len(errors)} shapes, median error {np.median(errors):.1%}")
    return asdict(found)


def fit_decode_attention(rows: list[Row], die: str) -> dict[str, float]:
    """One new token over step + 1 cached ones: the bytes of keys and values, and a fixed cost. Every query head of a group
    reads the same keys, so arithmetic stays far below the peak; the peak is the prefill kernel's.
    """
    (b, step, _, k, d), seconds, cards = medians(rows, ("batch_size", "step", "num_heads", "num_key_value_heads", "head_dim"))
    traffic = 4 * b * (step + 1) * k * d / memory_bandwidth(cards)

    def residuals(x: Floats) -> Floats:
        return np.log((x[1] + traffic / x[0]) / seconds)

    x = robust_fit(residuals, [0.7, 1e-5], [0.05, 1e-6], [1.2, 1e-4])
    errors = np.abs(np.expm1(residuals(x)))
    print(f"{die:16} decode attention bandwidth {x[0]:.3f} overhead {x[1] * 1e6:.1f} us; {len(errors)} shapes, "
          f"median error {np.median(errors):.1%}")  # fmt: skip
    return {"bandwidth_fraction": short(x[0]), "overhead_s": short(x[1])}


def fit_small_all_reduce(rows: list[Row], die: str) -> dict[str, float]:
    """The one-kernel all-reduces that engines capture in CUDA graphs, up to 8 MiB; medians over the libraries."""
    kernels = [r for r in rows if r["kernel_source"] != "vLLM_custom_eager" and float(r["message_size"]) <= 2**22]
    (n, elements), seconds, cards = medians(kernels, ("num_gpus", "message_size"))
    wire = 2 * 2 * elements * (n - 1) / n / peer_bandwidth(cards)

    def residuals(x: Floats) -> Floats:
        return np.log((x[0] + x[1] * (n - 1) + wire / x[2]) / seconds)

    latency, per_peer, bandwidth = robust_fit(residuals, [4e-6, 2e-7, 0.5], [1e-7, 0, 0.05], [1e-4, 1e-4, 1.5])
    errors = np.abs(np.expm1(residuals(np.array([latency, per_peer, bandwidth]))))
    print(f"{die:16} small all-reduce {bandwidth:.3f} of the link, {latency * 1e6:.1f} us; {len(errors)} shapes, "
          f"median error {np.median(errors):.1%}")  # fmt: skip
    return {"bandwidth_fraction": short(bandwidth), "latency_s": short(latency),
            "latency_per_peer_s": short(per_peer), "ramp_bytes": 0.0}  # fmt: skip


def fit_link(rows: list[Row], die: str, operations: tuple[str, ...]) -> dict[str, float]:
    """Collectives of 256 KiB and more inside one NVLink domain; message_size counts elements of 2 bytes."""
    chosen = [r for r in rows if r["op_name"] in operations and float(r["message_size"]) >= 2**17 and float(r["num_gpus"]) <= 8]
    n = np.array([float(r["num_gpus"]) for r in chosen])
    size = np.array([2 * float(r["message_size"]) for r in chosen])
    wire = size * (n - 1) / n * np.array([RING_SHARE[r["op_name"]] for r in chosen])
    seconds = np.array([float(r["latency_ms"]) * 1e-3 for r in chosen])
    bandwidth = peer_bandwidth([gpu(SYSTEMS[r["system"]]) for r in chosen])

    def residuals(x: Floats) -> Floats:
        return np.log((x[1] + x[2] * (n - 1) + (wire + np.sqrt(wire * x[3])) / (x[0] * bandwidth)) / seconds)

    x = robust_fit(residuals, [0.8, 5e-6, 1e-6, 1e6], [0.1, 0, 0, 0], [1.5, 1e-4, 1e-4, 1e9])
    errors = np.abs(np.expm1(residuals(x)))
    print(
        f"{die:16} {'+'.join(operations):40} {x[0]:.3f} of the link; {len(errors)} rows, median error {np.median(errors):.1%}"
    )
    return {
        "bandwidth_fraction": short(x[0]),
        "latency_s": short(x[1]),
        "latency_per_peer_s": short(x[2]),
        "ramp_bytes": short(x[3]),
    }


def roofline(peak: float, bandwidth: float, overhead: float) -> dict[str, float]:
    return {"peak_fraction": short(peak), "bandwidth_fraction": short(bandwidth), "overhead_s": short(overhead)}


def fit_die(folder: Path, die: str) -> dict[str, object]:
    """All constants of one die."""
    systems = [system for system, card in SYSTEMS.items() if gpu(card).silicon == die]
    of_die = {name: [row for row in timed(folder, name) if row["system"] in systems]
              for name in ("gemm", "context_attention", "nccl", "generation_attention", "custom_allreduce")}  # fmt: skip
    wide = [row for row in of_die["gemm"] if float(row["n"]) >= 1024 and float(row["k"]) >= 1024]
    matmuls = {
        PRECISIONS[kind]: [r for r in wide if r["gemm_dtype"] == kind] for kind in dict.fromkeys(r["gemm_dtype"] for r in wide)
    }
    fits = {precision: fit_matmul(rows, die, precision) for precision, rows in matmuls.items()}
    elementwise = fits["bf16"][1]
    attention = fit_attention(of_die["context_attention"], die)
    decode = fit_decode_attention(of_die["generation_attention"], die)
    small = {"small_all_reduce": fit_small_all_reduce(of_die["custom_allreduce"], die)} if of_die["custom_allreduce"] else {}
    return {
        "gpu": die,
        "matmul": {precision: fit[0] for precision, fit in fits.items()},
        "attention": attention,
        "memory_fraction": elementwise["bandwidth_fraction"],
        "kernel_overhead_s": elementwise["overhead_s"],
        "context_bytes": CONTEXT_BYTES,
        "nvlink": fit_link(of_die["nccl"], die, ("all_gather", "reduce_scatter", "all_reduce")),
        "all_to_all": fit_link(of_die["nccl"], die, ("alltoall",)),
        "thin_matmul": fit_thin(matmuls, die),
        "decode_attention": {"peak_fraction": attention["peak_fraction"], **decode},
        **small,
        "fitted_on": f"ops/*.csv, systems {', '.join(systems)}, "
        "by python -m benchmarks.accuracy.fit_gpus; memory_fraction and kernel_overhead_s are those of matmuls of all shapes",
    }


def with_b200(later: dict[str, object], earlier: dict[str, object]) -> dict[str, object]:
    """B300's constants with B200's where nobody timed B300's own.

    Nobody timed small all-reduces, and their links are the same. vLLM's nvfp4 matmuls are B200's on both dies: 4.9 and 4.5
    PFLOP/s, where B300's tensor cores do half as many again. Serving runs these; training calls cuBLAS, whose share of the
    peak is taken to be B200's.
    """
    matmul = {**later["matmul"], "nvfp4": earlier["matmul"]["nvfp4"]}  # type: ignore[dict-item, index]
    return {
        **later,
        "matmul": matmul,
        "small_all_reduce": earlier["small_all_reduce"],
        "fitted_on": f"{later['fitted_on']}; nvfp4 of training and small_all_reduce as b200",
    }


def generic(fitted: list[dict[str, object]]) -> dict[str, object]:
    """Geometric means over the fitted dies, for one that nobody measured."""

    def mean(values: list[object]) -> object:
        if isinstance(values[0], dict):
            shared = set.intersection(*(set(value) for value in values))
            return {key: mean([value[key] for value in values]) for key in values[0] if key in shared}
        return short(float(np.exp(np.mean(np.log(np.maximum(values, 1e-12))))))

    numbers = [{key: value for key, value in one.items() if key not in ("gpu", "fitted_on")} for one in fitted]
    names = ", ".join(str(one["gpu"]) for one in fitted)
    return {"gpu": "generic", **mean(numbers), "measured": False, "fitted_on": f"geometric means over {names}"}


def write(name: str, constants: dict[str, object], *, command: str = "benchmarks.accuracy.fit_gpus") -> None:
    write_constants(OUTPUT / f"{name}.yaml", constants, command=command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_argument(parser)
    folder = data_folder(parser.parse_args())
    if folder is None:
        return
    dies = dict.fromkeys(str(gpu(card).silicon) for card in SYSTEMS.values())
    fitted = {die: fit_die(folder, die) for die in dies}
    fitted["b300"] = with_b200(fitted["b300"], fitted["b200"])
    fitted["generic"] = generic([fitted[die] for die in TYPICAL])
    for die, origin in BORROWED.items():
        fitted[die] = fitted[origin] | {"gpu": die, "measured": False, "fitted_on": f"nobody measured it: as {origin}"}
    for name, constants in fitted.items():
        kernels = {kernel: short(seconds) for kernel, seconds in KERNELS.get(name, {}).items()}
        write(name, constants | {"attention_kernels": kernels})


if __name__ == "__main__":
    main()
