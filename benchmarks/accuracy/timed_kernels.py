"""Isolated kernel timings (ops/*.csv) by card and shape, robust fits of their seconds, and the fit
of routed-expert kernels (ops/moe.csv, moe_2.csv) by engine, release and weight format.

An engine does not run every expert kernel that was timed under its name. `formats` and `left_out`
in fits.yaml and FEW_TOKENS select the kernels that it runs. `fit_gpus` writes the constants.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.fitting import Floats, Values, fit_settings, rounded
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import version_key
from hp_tool.domain.hardware import GpuSpec, Precision
from hp_tool.loop.calibration.microbenchmarks import robust_fit

SYSTEMS = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm-80gb",
    "h200_sxm": "h200-sxm-141gb",
    "b200_sxm": "b200-sxm-180gb",
    "b300_sxm": "b300-sxm-288gb",
}
PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}


LATER = ("_b300", "_2")
"""Suffixes of the further files with the same kind of operation."""


def timed_rows(folder: Path, name: str) -> list[Row]:
    """Return the rows of one kind of operation, from all its files."""
    later = [
        file for ending in LATER if (folder / "ops" / (file := f"{name}{ending}.csv")).is_file()
    ]
    return [row for file in (f"{name}.csv", *later) for row in read(folder / "ops", file)]


Free = Mapping[str, Sequence[float]]
"""(start, minimum, maximum) of each free constant."""


def solve(
    residuals: Callable[[Values], Floats], free: Free, *, in_logarithms: bool = False
) -> Values:
    """Return the free constants that minimise the log ratios, with a robust loss.

    Args:
        residuals: Function from constants to log ratios of predicted to measured values.
        free: Start and bounds of each constant.
        in_logarithms: Search in the logarithms of the constants.
    """
    start, low, high = (np.array(column) for column in zip(*free.values(), strict=True))

    def named(x: Floats) -> Values:
        values = start * np.exp(x - 1.0) if in_logarithms else x
        return dict(zip(free, map(float, values), strict=True))

    first, bounds = start, (low, high)
    if in_logarithms:
        first, bounds = np.ones(len(free)), (1.0 + np.log(low / start), 1.0 + np.log(high / start))
    return named(robust_fit(lambda x: residuals(named(x)), list(first), *map(list, bounds)))


def fit_times(
    title: str,
    predicted_s: Callable[..., Floats],
    seconds: Floats,
    **free: Sequence[float],
) -> Values:
    """Return the constants for which `predicted_s(**constants)` is closest to these seconds, and
    print the error.
    """

    def residuals(values: Values) -> Floats:
        return np.asarray(np.log(predicted_s(**values) / seconds))

    values = solve(residuals, free)
    errors = np.abs(np.expm1(residuals(values)))
    words = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
    print(
        f"{title}: {words}; {len(errors)} rows, median error {np.median(errors):.1%}, mean "
        f"{errors.mean():.1%}"
    )
    return values


def medians(rows: list[Row], keys: tuple[str, ...]) -> tuple[Floats, Floats, list[GpuSpec]]:
    """Return (shapes (keys, n), seconds (n,), cards): for each shape on each card of a die, the
    median over kernels and repeats.
    """
    grouped: dict[tuple[str, tuple[float, ...]], list[float]] = defaultdict(list)
    for row in rows:
        grouped[row["system"], tuple(float(row[key]) for key in keys)].append(
            float(row["latency_ms"]) * 1e-3
        )
    shapes = np.array([shape for _, shape in grouped])
    return (
        shapes.T,
        np.array([np.median(times) for times in grouped.values()]),
        [gpu(SYSTEMS[name]) for name, _ in grouped],
    )


def memory_bandwidth(cards: list[GpuSpec]) -> Floats:
    return np.array([card.memory_bandwidth_bytes_per_second for card in cards])


def peak(cards: list[GpuSpec], precision: Precision) -> Floats:
    return np.array([card.peak_flops_per_second[precision] for card in cards])


GIVEN = fit_settings("expert_kernels")
ARITHMETIC, STORED_BYTES = GIVEN["arithmetic"], GIVEN["stored_bytes"]
FEW = "moe_torch_flow_min_latency"
FEW_TOKENS = 128
"""Tokens up to which TensorRT-LLM runs nvfp4 experts in its low-latency kernels
(`_enable_min_latency_mode` in tensorrt_llm/_torch/models/modeling_deepseekv3.py; aiconfigurator's
`query_moe` follows it).
"""
ELEMENTWISE = 0.85
"""Assumed fraction of the memory bandwidth that kernels without arithmetic reach."""
SHAPES = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_ep_size")
PROMPTS_FROM = 1024
"""Minimum number of tokens of a pass that contains prompts."""
OWN_COPIES = ("moe_torch_flow_cutlass", "deepgemm")
"""Kernels that process only the copies of tokens on their own rank. All other kernels permute the
copies of all ranks, which in an engine an exchange does.
"""
Kernels = dict[str, dict[str, dict[str, Any]]]
"""Constants of an ExpertKernel by release and weight format."""


def fit_experts(rows: list[Row], die: str) -> dict[str, Kernels]:
    """Return the constants of a die's routed experts by engine, release and weight format.

    Releases that run the same kernel share its constants, stored under the earliest release.
    """
    timed: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        _, engine, release = row["source"].split("/")
        if row["moe_dtype"] not in GIVEN["left_out"].get(f"{engine} {release} {die}", ()):
            timed[engine][release].append(row)
    return {
        engine: _of_engine(releases, f"{die:6} {engine}")
        for engine, releases in sorted(timed.items())
    }


def _of_engine(releases: dict[str, list[Row]], title: str) -> Kernels:
    fits: Kernels = defaultdict(dict)
    for name, kinds in GIVEN["formats"].items():
        kernels: dict[tuple[str, str], list[tuple[str, list[Row]]]] = defaultdict(list)
        for release in sorted(releases, key=version_key):
            of_kind = (
                [row for row in releases[release] if row["moe_dtype"] == kind] for kind in kinds
            )
            if members := next(filter(None, of_kind), None):
                usual = fit_rows([row for row in members if row["kernel_source"] != FEW], name)
                few = fit_rows([row for row in members if row["kernel_source"] == FEW], name)
                kernels[members[0]["moe_dtype"], usual[0]["kernel_source"]].append(
                    (release, usual + few)
                )
        for (kind, kernel), known in kernels.items():
            first, members = known[0][0], [row for _, each in known for row in each]
            usual, few = (
                [row for row in members if (row["kernel_source"] == kernel) is same]
                for same in (True, False)
            )
            fits[first][name] = _roofline(usual, name, kind, f"{title} {first} experts {name}")
            if few:
                quick = _roofline(few, name, kind, f"{title} {first} experts {name}, few tokens")
                fits[first][name] |= {"few_tokens": FEW_TOKENS, "few": quick}
    return dict(fits)


def fit_rows(rows: list[Row], name: str) -> list[Row]:
    """Return the rows that determine a kernel's constants, of one rank or of all experts of a
    layer.

    With few tokens, these are rows with evenly spread tokens, for which the number of experts hit
    is known. With many tokens, which hit all experts, they are rows of a single rank with a
    power-law spread, because no router is even. If kernels differ by shape, only rows of the most
    frequent kernel are returned.
    """
    few = [
        row
        for row in rows
        if row["distribution"] == "balanced" and float(row["num_tokens"]) < PROMPTS_FROM
    ]
    many = [
        row
        for row in rows
        if row["distribution"] != "balanced" and float(row["num_tokens"]) >= PROMPTS_FROM
    ]
    whole = [
        row
        for row in _evenly_routed(few, name)
        if row["moe_ep_size"] == "1" or row["kernel_source"] in OWN_COPIES
    ]
    whole += [row for row in many if row["moe_ep_size"] == "1"]
    usual = Counter(row["kernel_source"] for row in whole).most_common(1)
    return [row for row in whole if row["kernel_source"] == usual[0][0]]


def _evenly_routed(rows: Iterable[Row], name: str) -> list[Row]:
    """Return the rows without the shapes whose tokens cannot have hit as many experts as with an
    even router.

    Kernels that route tokens themselves use only some groups of the experts (DeepSeek's limit). At
    the card's bandwidth they could not have read the weights of all those experts in the measured
    time. A single token always hits its own experts.
    """
    shapes: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        shapes[(row["system"], row["kernel_source"], *(row[key] for key in SHAPES[1:]))].append(row)
    return [
        row
        for members in shapes.values()
        for impossible in [any(_bandwidth_share(row, name) > 1.0 for row in members)]
        for row in members
        if not impossible or row["num_tokens"] == "1"
    ]


def _bandwidth_share(row: Row, name: str) -> float:
    tokens, hidden, width, top_k, experts, ranks = (float(row[key]) for key in SHAPES)
    read = (
        STORED_BYTES[name]
        * 3.0
        * hidden
        * width
        * min(max(tokens * top_k / ranks, 1.0), experts / ranks)
    )
    return (
        read
        / gpu(SYSTEMS[row["system"]]).memory_bandwidth_bytes_per_second
        / (1e-3 * float(row["latency_ms"]))
    )


def _roofline(rows: list[Row], name: str, kind: str, title: str) -> dict[str, Any]:
    (tokens, hidden, width, top_k, experts, ranks), seconds, cards = medians(rows, SHAPES)
    copies, weights, bandwidth = (
        tokens * top_k / ranks,
        3.0 * hidden * width,
        memory_bandwidth(cards),
    )
    hit = np.minimum(np.maximum(copies, 1.0), experts / ranks)
    flops = 2.0 * weights / peak(cards, ARITHMETIC[kind])
    # Copies are gathered, activated and summed in 16 bits, as experts_seconds counts them.
    moved = copies * (6.0 * hidden + 8.0 * width) / bandwidth / ELEMENTWISE
    read = STORED_BYTES[name] * weights * hit / bandwidth

    def predicted_s(
        peak_fraction: float,
        bandwidth_fraction: float,
        overhead_s: float,
        tile_rows: float,
        sharpness: float,
    ) -> Floats:
        arithmetic, memory = (
            flops * (copies + tile_rows * hit) / peak_fraction,
            read / bandwidth_fraction,
        )
        return np.asarray(
            overhead_s + (arithmetic**sharpness + memory**sharpness) ** (1.0 / sharpness) + moved
        )

    values = rounded(fit_times(title, predicted_s, seconds, **GIVEN["roofline"]))
    usual = GIVEN["case_arithmetic"].get(name, ARITHMETIC[kind])
    return values | ({"arithmetic": ARITHMETIC[kind]} if ARITHMETIC[kind] != usual else {})
