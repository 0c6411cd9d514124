"""`python -m benchmarks.accuracy.headlines [--json]`: the field's headlines, our figure beside the
published one.

Needs no folder of measured figures.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from benchmarks.accuracy import days, dynamic_context
from benchmarks.accuracy.data import print_report
from benchmarks.accuracy.korthikanti import GPU, MODELS, a100
from benchmarks.accuracy.korthikanti import workload as workload_2022
from benchmarks.accuracy.published import (
    BLOOM,
    BLOOM_STEP_S,
    DYNAMIC_CONTEXT,
    KORTHIKANTI,
    KORTHIKANTI_2022,
    LLAMA,
    LLAMA_3,
    LLAMA_3_LAYOUT,
    MCORE_H100,
    MCORE_README,
    NARAYANAN,
    NARAYANAN_2021_TABLE_1,
    SHOEYBI,
    SHOEYBI_2019,
    Paper,
    ScalingRow,
    answer,
    fastest,
)
from hp_tool.catalog import gpu, model
from hp_tool.catalog.efficiency import efficiency
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.layer import layer_bytes, layer_time
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.units import GIB

OMNI_PATH_BYTES_PER_SECOND = 4 * 12.5e9 / 8
"""A GPU's share of Jean Zay's four 100 Gb/s ports a node."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Headline:
    """One figure beside the published one."""

    source: str
    date: str
    """Month of the software that was measured."""
    what: str
    published: str
    predicted: float
    unit: str
    error: float | None = None
    """predicted / published - 1 where one number was published."""
    note: str = ""


SOFTWARE_2021 = {
    "sequence_length": 2048,
    "precision": "fp16",
    "attention": "unfused",
    "dropout": 0.1,
    "gradient_precision": "fp16",
    "overlap": {"tensor_parallel": False},
    "framework_version": NARAYANAN.release,
}
"""fp16 with gradients reduced as they are, no fused attention, dropout, tensor parallelism's
collectives waited for: they ran behind matmuls from the end of that year on.
"""
PLAIN = {"sequence_parallel": False, "recompute": "full", "zero_stage": 0}
"""Layouts of 2019 to 2021: everything recomputed."""


def recomputed_flops(name: str, *, sequence: int, batch: int) -> float:
    """96 B s L h^2 (1 + s/6h + V/16Lh): arXiv 2104.04473, equation 3."""
    shape = model(name)
    h, layers = shape.hidden_size, shape.num_hidden_layers
    tail = 1.0 + sequence / (6.0 * h) + shape.vocab_size / (16.0 * layers * h)
    return 96.0 * batch * sequence * layers * h**2 * tail


def scaling_2021(row: ScalingRow) -> Headline:
    """Achieved TFLOP/s per GPU of the configuration that the authors' script runs."""
    sizes = ("tensor_parallel", "pipeline_parallel", "virtual_pipeline_parallel", "micro_batch")
    prediction = answer(
        {
            "model": row.model,
            "cluster": {"gpu": GPU, "num_gpus": row.gpus},
            "training": {**SOFTWARE_2021, "global_batch_size": row.global_batch_size},
            "parallel": {
                **PLAIN,
                **{f"{name}_size": getattr(row, f"{name}_size") for name in sizes},
            },
        }
    )
    assert prediction.time is not None
    flops = recomputed_flops(row.model, sequence=2048, batch=row.global_batch_size)
    rate = flops / prediction.time.step_s / row.gpus * 1e-12
    return dataclasses.replace(
        _figure(
            NARAYANAN,
            f"{row.model} on {row.gpus} A100",
            row.tflops_per_gpu,
            rate,
            "TFLOP/s per GPU",
        ),
        note="" if prediction.feasible else "said not to fit",
    )


def gpt2_2019() -> list[Headline]:
    """Sustained FLOP/s of 8.3B on 512 V100, and per GPU against 1.2B on one: with all parallelism,
    tensor parallelism alone, and gradients reduced after the backward pass instead of behind it
    (--DDP-impl local and torch).

    Scores were scaled, masked and dropped in kernels of their own (mpu/transformer.py). The paper
    does not say whether its FLOP/s count recomputation; these do not.
    """
    single = tflops_2019("gpt2-1.2b", gpus=1)
    sizes = ((512, True), (8, None), (512, False))
    behind, alone, after = (tflops_2019("gpt2-8.3b", gpus=gpus, behind=on) for gpus, on in sizes)
    scaling = {
        "scaling": ("GPT-2 8.3B on 512 V100: scaling from 1.2B on one GPU", behind),
        "tensor_scaling": ("GPT-2 8.3B on 8 V100: scaling", alone),
        "exposed_scaling": (
            "GPT-2 8.3B on 512 V100, gradients reduced after the backward pass: scaling",
            after,
        ),
    }
    published, figure = SHOEYBI_2019, functools.partial(_figure, SHOEYBI)
    return [
        figure(
            "GPT-2 8.3B on 512 V100, recomputation not counted",
            published["petaflops"],
            0.512 * behind,
            "PFLOP/s",
        ),
        *(
            figure(what, 100.0 * published[key], 100.0 * rate / single, "%")
            for key, (what, rate) in scaling.items()
        ),
        figure("GPT-2 1.2B on one V100", published["single_gpu_tflops"], single, "TFLOP/s"),
    ]


def tflops_2019(name: str, *, gpus: int, behind: bool | None = None) -> float:
    """Model TFLOP/s per V100 of a DGX-2H, eight sequences on one GPU or eight; `behind`: reduced
    behind the backward pass.
    """
    t = min(gpus, 8)
    rate = answer(
        {
            "model": name,
            "cluster": {"node_type": "dgx-2h", "num_gpus": gpus, "gpus_per_node": min(gpus, 16)},
            "training": {
                **SOFTWARE_2021,
                "sequence_length": 1024,
                "global_batch_size": 8 * gpus // t,
                "overlap": {"tensor_parallel": False, "data_parallel": behind},
                "kernel_fusion": False,
                "framework_version": SHOEYBI.release,
            },
            "parallel": {**PLAIN, "tensor_parallel_size": t, "micro_batch_size": 8},
        }
    ).model_tflops_per_gpu
    assert rate is not None
    return rate


def korthikanti_2022() -> list[Headline]:
    """Return the overhead of recomputation and the activation memory of one layer, 22B to 1T."""
    headlines = []
    for size, name in MODELS.items():
        full, selective = (layer_overhead(name, recompute=kind) for kind in ("full", "selective"))
        headlines += [
            _range("overhead_full", f"{size}: overhead of full recomputation, one layer", full),
            _range(
                "overhead_selective",
                f"{size}: overhead of selective recomputation with SP",
                selective,
            ),
            Headline(
                source=KORTHIKANTI.source,
                date=KORTHIKANTI.date,
                what=f"{size}: activation memory of a layer, tensor parallel over SP + selective",
                published=f"{KORTHIKANTI_2022['memory_factor']:.0f}",
                predicted=layer_memory_factor(name),
                unit="x",
            ),
        ]
    return headlines


def layer_overhead(name: str, *, recompute: str) -> float:
    """Seconds that recomputation adds to one layer's forward and backward pass without any, less
    what sequence parallelism saves where it comes with it: TP 8, micro-batch 1 (22B: 4), as in the
    paper's figure 8.
    """
    base, full = _layer(name, sharded=False), 0.0
    plain = base.forward + base.backward + base.tensor + base.tensor_backward
    if recompute == "full":
        full = base.forward + base.tensor
        return float(full / plain)
    sharded = _layer(name, sharded=True)
    both = (
        sharded.forward
        + sharded.backward
        + sharded.tensor
        + sharded.tensor_backward
        + sharded.repeated
    )
    return float(both / plain - 1.0)


def _layer(name: str, *, sharded: bool) -> Any:
    micro_batch = 4 if name == MODELS["22B"] else 1
    config = ParallelConfig(
        tensor_parallel_size=8, micro_batch_size=micro_batch, sequence_parallel=sharded
    )
    return layer_time(case=_case(name, micro_batch), candidates=Candidates.alone(config))


def _case(name: str, micro_batch: int) -> TrainingCase:
    profile = efficiency(gpu=gpu(GPU), framework="megatron-core")
    return TrainingCase(
        model=model(name), cluster=a100(8), workload=workload_2022(micro_batch), profile=profile
    )


def layer_memory_factor(name: str) -> float:
    """Bytes a layer keeps under tensor parallelism alone, over those under SP and selective
    recomputation.
    """
    sizes = [
        layer_bytes(
            case=_case(name, 1),
            candidates=Candidates.alone(
                ParallelConfig(tensor_parallel_size=8, sequence_parallel=sharded)
            ),
        )
        for sharded in (False, True)
    ]
    return float(sizes[0].saved / sizes[1].saved_selective)


def strong_scaling_h100() -> list[Headline]:
    """MFU of the fastest layout that fits; the published layout is not known."""
    headlines = []
    for name, gpus, batch, published in MCORE_H100:
        best = fastest(
            {
                "model": name,
                "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": gpus},
                "training": {
                    "sequence_length": 4096,
                    "global_batch_size": batch,
                    "framework_version": MCORE_README.release,
                },
                "parallel": {"zero_stage": 1},
            }
        )
        config, mfu = best.parallel, best.estimate.mfu
        assert mfu is not None
        layout = (
            f"TP {config.tensor_parallel_size}, PP {config.pipeline_parallel_size}, CP "
            f"{config.context_parallel_size}"
        )
        headlines.append(
            dataclasses.replace(
                _figure(
                    MCORE_README, f"{name} on {gpus} GPUs: MFU", 100.0 * published, 100.0 * mfu, "%"
                ),
                note=f"our fastest layout, {layout}; theirs is not published",
            )
        )
    return headlines


def llama_2024() -> list[Headline]:
    """TFLOP/s per GPU of Llama 3.1 405B's pre-training by the recipe of its paper, and the memory
    that it needs.
    """
    headlines = []
    for gpus, length, batch, context, published in LLAMA_3:
        prediction = answer(
            {
                "model": "llama-3.1-405b",
                "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": gpus},
                "training": {
                    "sequence_length": length,
                    "global_batch_size": batch,
                    "recipe": "llama-3-405b",
                },
                "parallel": {
                    "context_parallel_size": context,
                    "virtual_pipeline_parallel_size": 8,
                    **LLAMA_3_LAYOUT,
                },
            }
        )
        rate, memory = prediction.model_tflops_per_gpu, prediction.memory
        assert rate is not None and memory is not None and prediction.feasible, prediction.reasons
        what = f"Llama 3.1 405B on {gpus:,} H100, s = {length:,}"
        headlines.append(
            dataclasses.replace(
                _figure(LLAMA, what, published, rate, "TFLOP/s per GPU"),
                note=f"by recipe llama-3-405b; needs {memory.total_bytes / GIB:.1f} GiB",
            )
        )
    return headlines


def training_days() -> list[Headline]:
    """Return days and GPU-hours of 175B on 300B tokens with 1,024 A100 with and without the
    techniques of Table 5's paper.

    24 days are NVIDIA's for SP and selective recomputation. The 34 days that they are compared with
    are the rule of 2021's paper with 2021's software; the gain of the techniques alone is Table
    5's.
    """
    found = days.evaluate()
    fast, slow = found["selective_sequence_parallel_days"], found["full_recompute_days"]
    hours = 24.0 * days.GPUS

    def derived(what: str, published: str, predicted: float, unit: str) -> Headline:
        note = "published for 2021's software"
        return Headline(
            source="derived",
            date="2021-04",
            what=what,
            published=published,
            predicted=predicted,
            unit=unit,
            note=note,
        )

    gain = KORTHIKANTI_2022["throughput_gain_175b"]
    return [
        _figure(KORTHIKANTI, "GPT-3 175B, SP + selective: days", 24.0, fast, "days"),
        _figure(
            KORTHIKANTI,
            "GPT-3 175B, SP + selective over full recomputation: throughput",
            1.0 + gain,
            slow / fast,
            "x",
        ),
        derived("GPT-3 175B, full recomputation, no SP: days", "34", slow, "days"),
        derived(
            "GPT-3 175B: GPU-hours saved by SP + selective",
            "250,000 (34 -> 24 days)",
            hours * (slow - fast),
            "GPU-hours",
        ),
    ]


def bloom_2022() -> list[Headline]:
    """Return the seconds of a step of BLOOM 176B, asked as Megatron Core: Megatron-DeepSpeed has no
    constants of its own.
    """
    prediction = answer(
        {
            "model": "bloom-176b",
            "cluster": {
                "gpu": GPU,
                "num_gpus": 384,
                "inter_node_bandwidth_bytes_per_second": OMNI_PATH_BYTES_PER_SECOND,
            },
            "training": {
                "sequence_length": 2048,
                "global_batch_size": 2048,
                "precision": "bf16",
                "attention": "unfused",
                "gradient_precision": "bf16",
                "framework_version": BLOOM.release,
            },
            "parallel": {
                **PLAIN,
                "tensor_parallel_size": 4,
                "pipeline_parallel_size": 12,
                "micro_batch_size": 2,
                "zero_stage": 1,
            },
        }
    )
    assert prediction.time is not None
    return [
        _figure(
            BLOOM,
            "BLOOM 176B on 384 A100: seconds per step",
            BLOOM_STEP_S,
            prediction.time.step_s,
            "s",
        )
    ]


def dynamic_context_2026() -> list[Headline]:
    """Return the gain of dynamic over static context parallelism, over packing, for the lengths
    most like the published.
    """
    rows = dynamic_context.evaluate(["synthetic-code"])["scenarios"][0]["rows"]
    figure = _figure(
        DYNAMIC_CONTEXT,
        "Dynamic context parallelism, Llama 2 13B on 128 H100, over packing",
        dynamic_context.PUBLISHED_BEST,
        rows[0]["gain_over_packing"],
        "x",
    )
    return [
        dataclasses.replace(figure, note="an upper bound on other data: theirs is not published")
    ]


def evaluate() -> list[Headline]:
    """All of them."""
    return [
        *gpt2_2019(),
        *(scaling_2021(row) for row in NARAYANAN_2021_TABLE_1),
        *korthikanti_2022(),
        *bloom_2022(),
        *llama_2024(),
        *dynamic_context_2026(),
        *training_days(),
        *strong_scaling_h100(),
    ]


def _figure(paper: Paper, what: str, published: float, predicted: float, unit: str) -> Headline:
    return Headline(
        source=paper.source,
        date=paper.date,
        what=what,
        published=f"{published:g}",
        predicted=predicted,
        unit=unit,
        error=predicted / published - 1.0,
    )


def _range(key: str, what: str, predicted: float) -> Headline:
    """Return a percentage beside a published range; the error is of the time with the overhead,
    against the nearest bound.
    """
    low, high = KORTHIKANTI_2022[key]  # type: ignore[misc]
    nearest = min(max(predicted, low), high)
    return Headline(
        source=KORTHIKANTI.source,
        date=KORTHIKANTI.date,
        what=what,
        published=f"{100 * low:.0f}-{100 * high:.0f}",
        predicted=100.0 * predicted,
        unit="%",
        error=(1.0 + predicted) / (1.0 + nearest) - 1.0,
    )


if __name__ == "__main__":
    print_report(
        description=__doc__,
        evaluate=evaluate,
        as_dict=lambda found: [dataclasses.asdict(one) for one in found],
        needs_data=False,
    )
