"""Numbers as people read them. Pages only: JSON twins keep the plain figures."""

from __future__ import annotations

import math
from datetime import datetime

from hp_tool.domain.parallel import ParallelConfig
from hp_tool.units import JOULES_PER_MWH

ABSENT = "–"
WORDS = {
    "pipeline_p2p": "pipeline transfers",
    "prefill_interference": "others' prefill",
    "num_gpus": "GPUs",
    "price_per_gpu_hour": "dollars a GPU-hour",
    "price_per_hour": "dollars an hour",
}
"""Names that plain words would spoil."""
SPELT = {"gpu": "GPU", "gpus": "GPUs", "kv": "KV", "nvlink": "NVLink", "pcie": "PCIe", "flops": "FLOPs"}
"""Words that are written otherwise than in a name."""


def seconds(value: float | None) -> str:
    """1.234 s, 12.3 ms; three significant digits and more only where they are whole."""
    if value is None:
        return ABSENT
    if 0 < abs(value) < 1e-3:
        return f"{_digits(value * 1e6)} µs"
    return f"{_digits(value * 1e3)} ms" if abs(value) < 1 else f"{_significant(value)} s"


def count(value: float | None) -> str:
    """12,345; 1.23 below a hundred."""
    return ABSENT if value is None else _significant(value)


def gib(value: float | None) -> str:
    """Bytes in GiB (2**30), or MiB where that is below a tenth."""
    if not value:
        return ABSENT if value is None else "0 GiB"
    return f"{value / 2**30:.2f} GiB" if value >= 0.1 * 2**30 else f"{value / 2**20:.1f} MiB"


def billions(value: float | None) -> str:
    """A number of parameters: 1.01 T, 70.6 B, 125 M."""
    if value is None:
        return ABSENT
    if value >= 0.9995e12:
        return f"{value / 1e12:.3g} T"
    return f"{value / 1e9:.3g} B" if value >= 1e9 else f"{value / 1e6:.3g} M"


def per_second(value: float | None) -> str:
    """Bytes a second in GB (10**9)."""
    return ABSENT if value is None else f"{value / 1e9:,.4g} GB/s"


def tflops(value: float | None) -> str:
    """FLOPs a second in TFLOP/s (10**12)."""
    return ABSENT if value is None else f"{value / 1e12:,.4g} TFLOP/s"


def duration(value: float | None) -> str:
    """40 s, 12 min, 3.5 h."""
    if value is None:
        return ABSENT
    if value < 90:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 90 * 60 else f"{_significant(value / 3600)} h"


def gpu_time(value: float | None) -> str:
    """Seconds of devices in GPU-hours, or GPU-seconds where that is below a tenth."""
    if value is None:
        return ABSENT
    return f"{_significant(value / 3600)} GPU-h" if value >= 360 else f"{_significant(value)} GPU-s"


def tick(value: float, unit: str) -> str:
    """A round value on an axis, without zeros at its end; bytes in GiB, which the caption says."""
    if unit == "bytes":
        return f"{value / 2**30:,g}"
    return f"{value:,g} s" if value >= 1 else seconds(value) if value else "0"


def percent(value: float | None) -> str:
    """A signed share: +3.1 %."""
    return ABSENT if value is None else f"{value * 100:+.1f} %".replace("-", "−")


def share(value: float | None) -> str:
    """A plain share: 41.3 %."""
    if value is None:
        return ABSENT
    return f"{value * 100:.3g} %" if value == 0 or abs(value) >= 1e-4 else "below 0.01 %"


def arrows(text: str) -> str:
    """`TP 1 -> 8` with an arrow that screens have."""
    return text.replace(" -> ", " → ")


def words(name: str) -> str:
    """A part's or field's name as people write it."""
    return WORDS.get(name) or " ".join(SPELT.get(word, word) for word in name.split("_"))


def measured(value: float | None, unit: str) -> str:
    """A figure with its unit."""
    if value is None:
        return ABSENT
    match unit:
        case "seconds":
            return seconds(value)
        case "bytes":
            return gib(value)
        case "share":
            return share(value)
        case "change":
            return percent(value)
        case "tflops":
            return f"{_significant(value)} TFLOP/s"
        case "days":
            return f"{_significant(value)} days"
        case "hours":
            return f"{value:,.0f} h"
        case "dollars":
            return f"${value:,.0f}" if value >= 100 else f"${value:.2f}" if value >= 1 else f"${value:.3g}"
        case "joules":
            return f"{_significant(value / JOULES_PER_MWH)} MWh"
        case _:
            return _significant(value)


def moment(value: datetime | None) -> str:
    """A day and minute in UTC."""
    return ABSENT if value is None else f"{value:%Y-%m-%d %H:%M} UTC"


def arithmetic(parallel: ParallelConfig) -> str:
    """TP 2 x PP 1 x DP 1 = 2 GPUs. Context parallelism stands there only where it is used."""
    sizes = {"TP": parallel.tensor_parallel_size, "PP": parallel.pipeline_parallel_size}
    if parallel.context_parallel_size > 1:
        sizes["CP"] = parallel.context_parallel_size
    sizes["DP"] = parallel.data_parallel_size
    product = math.prod(sizes.values())
    return " x ".join(f"{name} {size}" for name, size in sizes.items()) + f" = {product} GPU{'s' if product > 1 else ''}"


def details(parallel: ParallelConfig) -> str:
    """What else distinguishes a configuration, in a few words."""
    recompute = parallel.recompute if isinstance(parallel.recompute, str) else parallel.recompute.granularity
    words = [f"micro-batch {parallel.micro_batch_size}"]
    if parallel.virtual_pipeline_parallel_size > 1:
        words.append(f"{parallel.virtual_pipeline_parallel_size} chunks per pipeline rank")
    if parallel.expert_parallel_size > 1:
        words.append(f"EP {parallel.expert_parallel_size}")
    if parallel.sequence_parallel:
        words.append("sequence parallel")
    words.append("no recomputation" if recompute == "none" else f"{recompute} recomputation")
    if parallel.zero_stage != 1:
        words.append(f"ZeRO {parallel.zero_stage}")
    if parallel.data_parallel_shard_size:
        words.append(f"shard groups of {parallel.data_parallel_shard_size}")
    return ", ".join(words)


def _digits(value: float) -> str:
    """Three significant ones without an exponent, of values up to a thousand: 999.6 is 1000."""
    return f"{float(f'{value:.3g}'):g}"


def _significant(value: float) -> str:
    if value == int(value) or abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 0.01 else f"{value:#.3g}"
