"""Numbers as people read them. Pages only: JSON twins keep the plain figures."""

from __future__ import annotations

import math
from datetime import datetime

from hp_tool.domain.parallel import ParallelConfig

ABSENT = "–"


def seconds(value: float | None) -> str:
    """1.234 s, 12.3 ms; three significant digits and more only where they are whole."""
    if value is None:
        return ABSENT
    return f"{value * 1e3:.3g} ms" if abs(value) < 1 else f"{_significant(value)} s"


def count(value: float | None) -> str:
    """12,345; 1.23 below a hundred."""
    return ABSENT if value is None else _significant(value)


def gib(value: float | None) -> str:
    """Bytes in GiB (2**30), or MiB where that is below a tenth."""
    if value is None:
        return ABSENT
    return f"{value / 2**30:.2f} GiB" if value >= 0.1 * 2**30 else f"{value / 2**20:.1f} MiB"


def percent(value: float | None) -> str:
    """A signed share: +3.1 %."""
    return ABSENT if value is None else f"{value * 100:+.1f} %".replace("-", "−")


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


def _significant(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
