"""Published figures that are facts with a citation, embedded because no measured file is needed to
check them.

For H100 the layout is not published: predictions take the fastest that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.accuracy.data import print_report
from hp_tool.domain.result import Estimate, Recommendation
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate, recommend


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Where figures were published, and the software that they were measured with."""

    source: str
    date: str
    """Month of publication."""
    release: str | None = None
    """NVIDIA container of that month, as `training.framework_version`; None: the constants are of
    the paper's own software.
    """


SHOEYBI = Paper(source="arXiv 1909.08053", date="2019-09")
NARAYANAN = Paper(source="arXiv 2104.04473 table 1", date="2021-04", release="21.04")
KORTHIKANTI = Paper(source="arXiv 2205.05198", date="2022-05")
BLOOM = Paper(source="arXiv 2211.05100", date="2022-03")
MCORE_README = Paper(source="Megatron-LM README, H100", date="2024-05", release="24.05")
LLAMA = Paper(source="arXiv 2407.21783 table 4", date="2024-07")
DYNAMIC_CONTEXT = Paper(source="NVIDIA's technical blog", date="2026-01")


@dataclass(frozen=True, kw_only=True)
class Check:
    """A published figure of a run that no constant saw, beside ours."""

    what: str
    source: str
    assumed: str
    """What the publication does not tell."""
    unit: str
    published: float
    predicted: float
    tolerance: str
    within: bool
    feasible: bool = True
    factor: float | None = None
    """Of the 90 % interval, either way."""


def answer(query: Mapping[str, Any]) -> Estimate:
    """Return the answer to a training query as users write it; it has a time."""
    prediction = estimate(query=parse_query({"kind": "training", **query}), with_fixes=False)
    assert prediction.time is not None, prediction.reasons
    return prediction


def fastest(query: Mapping[str, Any]) -> Recommendation:
    """Return the first recommendation of a training query as users write it."""
    found = recommend(query=parse_query({"kind": "training", **query}), top=1).recommendations
    if not found:
        raise RuntimeError(f"nothing fits: {query['model']}")
    return found[0]


def print_checks(description: str | None, evaluate: Callable[[], list[Check]]) -> None:
    """Run the command line of a module of checks."""
    print_report(
        description=description,
        evaluate=evaluate,
        as_dict=lambda found: [asdict(one) for one in found],
        needs_data=False,
    )


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """One model of a scaling study."""

    model: str
    """Catalogue name."""
    gpus: int
    global_batch_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    virtual_pipeline_parallel_size: int
    micro_batch_size: int
    tflops_per_gpu: float
    """By the paper's formula, recomputation counted: 96 B s L h^2 (1 + s/6h + V/16Lh) / (n t)."""


NARAYANAN_2021_TABLE_1 = tuple(
    ScalingRow(
        model=model,
        gpus=gpus,
        global_batch_size=batch,
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        virtual_pipeline_parallel_size=v,
        micro_batch_size=b,
        tflops_per_gpu=rate,
    )
    for model, t, p, v, b, gpus, batch, rate in (
        ("gpt-1.7b", 1, 1, 1, 16, 32, 512, 137.0),
        ("gpt-3.6b", 2, 1, 1, 16, 64, 512, 138.0),
        ("gpt-7.5b", 4, 1, 1, 16, 128, 512, 142.0),
        ("gpt-18b", 8, 1, 1, 8, 256, 1024, 135.0),
        ("gpt-39b", 8, 2, 1, 4, 512, 1536, 138.0),
        ("gpt-76b", 8, 4, 3, 2, 1024, 1792, 140.0),
        ("gpt-145b", 8, 8, 2, 2, 1536, 2304, 148.0),
        ("gpt-310b", 8, 16, 2, 1, 1920, 2160, 155.0),
        ("mt-nlg-530b", 8, 35, 3, 1, 2520, 2520, 163.0),
        ("gpt-1t", 8, 64, 1, 1, 3072, 3072, 163.0),
    )
)
"""arXiv 2104.04473, table 1: Selene (A100 80GB, 8 x 200 Gb/s), s = 2048, V = 51,200, everything
recomputed, fp16, the software of 2021. Micro-batches and model chunks are those of the authors'
script, Megatron-LM's examples/sc21/run_table_1.sh.
"""

SHOEYBI_2019 = {
    "petaflops": 15.1,
    "scaling": 0.76,
    "tensor_scaling": 0.77,
    "exposed_scaling": 0.60,
    "single_gpu_tflops": 39.0,
}
"""arXiv 1909.08053, abstract and section 5.1: GPT-2 8.3B on 512 V100 (DGX-2H), 8-way tensor times
64-way data parallel, against 1.2B on one GPU; batch 8 a replica, s = 1024, every layer recomputed.
Figure 5: tensor parallelism alone. Megatron-LM's README: gradients reduced after the backward pass.
"""

KORTHIKANTI_2022 = {
    "overhead_full": (0.36, 0.39),
    "overhead_selective": (0.02, 0.04),
    "memory_factor": 5.0,
    "throughput_gain_175b": 0.318,
}
"""arXiv 2205.05198: abstract and section 6.2 (5x less activation memory, recomputation's overhead
of one layer from 36-39 % to 2-4 % or, for the smallest model, 7 %) and table 5 (29.0, 31.8, 29.7
and 32.1 % more throughput from 22B to 1T).
"""

LLAMA_3 = (
    # GPUs, sequence length, sequences a step, context parallel, TFLOP/s per GPU
    (8192, 8192, 2048, 1, 430.0),
    (16384, 8192, 2048, 1, 400.0),
    (16384, 131072, 128, 16, 380.0),
)
"""arXiv 2407.21783, table 4: the stages of Llama 3.1 405B's pre-training on H100, TP 8 and PP 16.
Section 3.3.2: the schedule is interleaved; the first model chunk holds the embedding alone and the
last one the output layer, which with 126 layers makes eight chunks a rank of one layer each. How
FLOPs are counted is not told: taken as torchtitan does, attention in full.
"""
LLAMA_3_LAYOUT = {"tensor_parallel_size": 8, "pipeline_parallel_size": 16, "micro_batch_size": 1}

BLOOM_STEP_S = 105.0
"""arXiv 2211.05100, section 3.2: BLOOM 176B on 384 A100 under Megatron-DeepSpeed, TP 4, PP 12 and
DP 8, micro-batch 2, batch 2,048, bf16, everything recomputed; 150 TFLOP/s per GPU, 105 s per
iteration.
"""

MCORE_H100 = (
    # model, GPUs, batch, published MFU
    ("mcore-gpt-177b", 96, 1152, 0.47),
    ("mcore-gpt-177b", 4608, 1152, 0.42),
    ("mcore-gpt-462b", 6144, 3072, 0.475),
)
"""Megatron-LM's README of 2024, on H100 in bf16, s = 4096, V = 131,072, communication overlapped:
strong scaling of 177B, and the largest model of the weak scaling, 462B (47 to 48 % MFU). The batch
of 462B is not published as text: 3,072 is assumed; with half of it the predicted MFU is 44 %, with
twice as much 48 %. Batches and GPUs of the other models stand in a picture alone.
"""
