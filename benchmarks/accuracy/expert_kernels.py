"""Fit routed-expert kernels (ops/moe.csv, moe_2.csv) by engine, release and weight format;
`fit_gpus` writes them.

An engine does not run every kernel that was timed under its name: FORMATS, FEW_TOKENS and HELPERS
select those it runs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from benchmarks.accuracy.data import Row
from benchmarks.accuracy.fitting import Floats, rounded
from benchmarks.accuracy.timed_kernels import SYSTEMS, fit_times, medians, memory_bandwidth, peak
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import version_key
from hp_tool.domain.hardware import Precision

FORMATS = {
    "bf16": ("bfloat16",),
    "fp8": ("fp8_block",),
    "fp8_tensor": ("fp8",),
    "mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4"),
    "int4": ("int4_wo",),
    "nvfp4": ("nvfp4",),
}
"""Names in ops/ of each weight format's kernels, the preferred first. Published mixtures in fp8
have a scale for each block.

An engine whose kernel for 8-bit activations was timed runs mxfp4 weights with it by default.
TensorRT-LLM does so on Blackwell (`get_mxfp4_quant_algo` in tensorrt_llm/_torch/model_config.py),
and so does SGLang (`flashinfer_mxfp4_moe_precision`). vLLM keeps 16 bits there unless
VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8 is set.
"""
ARITHMETIC: dict[str, Precision] = {
    "bfloat16": "bf16",
    "fp8_block": "fp8",
    "fp8": "fp8",
    "w4a8_mxfp4_mxfp8": "fp8",
    "w4a16_mxfp4": "bf16",
    "int4_wo": "bf16",
    "nvfp4": "nvfp4",
}
CASE_ARITHMETIC: dict[str, Precision] = {"mxfp4": "bf16"}
"""Precision that a case multiplies a format in (`serving.weights`), where a kernel may differ from
it.
"""
STORED_BYTES = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_tensor": 1.0,
    "mxfp4": 0.5 + 1.0 / 32.0,
    "int4": 0.5 + 2.0 / 128.0,
    "nvfp4": 0.5 + 1.0 / 16.0,
}
FEW = "moe_torch_flow_min_latency"
FEW_TOKENS = 128
"""Tokens up to which TensorRT-LLM runs nvfp4 experts in its low-latency kernels
(`_enable_min_latency_mode` in tensorrt_llm/_torch/models/modeling_deepseekv3.py; aiconfigurator's
`query_moe` follows it).
"""
HELPERS = {
    ("vllm", "0.19.0", "h100"): ("fp8", "fp8_block", "int4_wo", "nvfp4", "w4a16_mxfp4"),
    ("vllm", "0.19.0", "b200"): ("fp8", "fp8_block", "int4_wo", "nvfp4", "w4a16_mxfp4"),
    ("sglang", "0.5.14", "h100"): ("bfloat16", "fp8_block", "int4_wo", "w4a16_mxfp4"),
}
"""Rows left out by engine, release and die, because they did not time the layer that the engine
runs (see the same release of aiconfigurator's collector/*/collect_moe.py).

vLLM 0.19.0: the collector called `fused_experts` and FlashInfer's functions with tokens already
routed, whichever kernel vLLM chooses. In mxfp4 one of eight ranks takes as long as all experts. On
Blackwell that is 3.5 times as long as FlashInfer's kernel, which vLLM prefers there
(`get_mxfp4_backend` in vllm/model_executor/layers/quantization/mxfp4.py).

SGLang 0.5.14 on Hopper: the collector called `fused_moe` with tokens already routed, and widened
mxfp4 weights to 16 bits. SGLang runs the same Triton kernels there as vLLM (`triton_kernel` for
mxfp4 in sglang/srt/server_args.py).
"""
ELEMENTWISE = 0.85
"""Share of the bandwidth taken for kernels that only move memory."""
SHAPES = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_ep_size")
PROMPTS_FROM = 1024
"""Tokens from which a pass holds prompts."""
OWN_COPIES = ("moe_torch_flow_cutlass", "deepgemm")
"""Kernels that go through their own rank's copies of tokens alone; the others permute all ranks',
which an exchange does.
"""
Kernels = dict[str, dict[str, dict[str, Any]]]
"""Constants of an ExpertKernel by release and weight format."""


def fit_experts(rows: list[Row], die: str) -> dict[str, Kernels]:
    """Return the constants of a die's routed experts by engine, release and weight format.

    Releases that run the same kernel share its constants, under the first of them.
    """
    timed: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        _, engine, release = row["source"].split("/")
        if row["moe_dtype"] not in HELPERS.get((engine, release, die), ()):
            timed[engine][release].append(row)
    return {
        engine: _of_engine(releases, f"{die:6} {engine}")
        for engine, releases in sorted(timed.items())
    }


def _of_engine(releases: dict[str, list[Row]], title: str) -> Kernels:
    fits: Kernels = defaultdict(dict)
    for name, kinds in FORMATS.items():
        kernels: dict[tuple[str, str], list[tuple[str, list[Row]]]] = defaultdict(list)
        for release in sorted(releases, key=version_key):
            of_kind = (
                [row for row in releases[release] if row["moe_dtype"] == kind] for kind in kinds
            )
            if members := next(filter(None, of_kind), None):
                usual = chosen([row for row in members if row["kernel_source"] != FEW], name)
                few = chosen([row for row in members if row["kernel_source"] == FEW], name)
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


def chosen(rows: list[Row], name: str) -> list[Row]:
    """Return the rows that tell a kernel's constants, one rank's or all of a layer's experts.

    Of few tokens take those spread evenly, which tells the experts hit; of many, which hit all, on
    one rank those that a power law spreads: no router is even. Where shapes run unlike kernels,
    take the one that most shapes run.
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
    """Return the rows without shapes whose tokens cannot have hit as many experts as an even router
    does.

    Kernels that route tokens themselves keep to some groups of the experts (DeepSeek's limit).
    Reading the weights of all those experts would then exceed the card's bandwidth. A single token
    always hits its own experts.
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
    """Return a GroupedRoofline's constants of one kernel."""
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

    values = rounded(
        fit_times(
            title,
            predicted_s,
            seconds,
            peak_fraction=(0.5, 0.05, 1.0),
            bandwidth_fraction=(0.8, 0.1, 1.0),
            overhead_s=(4e-5, 1e-6, 3e-4),
            tile_rows=(16.0, 0.5, 256.0),
            sharpness=(2.0, 1.0, 6.0),
        )
    )
    return values | (
        {"arithmetic": ARITHMETIC[kind]}
        if ARITHMETIC[kind] != CASE_ARITHMETIC.get(name, ARITHMETIC[kind])
        else {}
    )
