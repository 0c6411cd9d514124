"""Write the profiles of PyTorch's trainers: `python -m evidence.fit --only trainers`.

Their constants are those of torch-fsdp on A100, which no run of a trainer touched, except where a
trainer's own code decides: elementwise operations move the bytes that eager kernels are counted to
move (`cost.block`), so the factor on them is 1; the optimizer's step passes over memory as torch's
foreach or fused Adam does; the host takes `HOST_LAUNCH_S` for each launch. No time scalar is
fitted. What the runs give is how far they scatter: a trainer with enough runs has its own scatter,
any other that of all of them, each trainer with the same weight.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.accuracy import trainers
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.fitting import conformal_sd, framework_file, weighted_sd
from evidence.fitted_file import FittedFile
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import doubts, efficiency
from hp_tool.domain.efficiency import FrameworkEfficiency

COMMAND = "python -m evidence.fit --only trainers"
HOST_LAUNCH_S = 2.9e-5
"""Seconds of the host for one eager launch. Judged on LoRA of Qwen-7B and Qwen-1.8B at 256 tokens,
where a step does not depend on the length: 4.9 ms a layer for 168 launches.
"""
FOREACH_TRAFFIC = 3.0
"""48 bytes a parameter in 16 bits over the least 16: decay, both moments, root, quotient, epsilon
and update (torch/optim/adam.py, _multi_tensor_adam), the norm and the scaling of gradients.
"""
FUSED_TRAFFIC = 1.391
"""As torch-fsdp's, whose runs had a fused optimizer."""
OPTIMIZERS = {
    "hf-trainer": FOREACH_TRAFFIC,
    "litgpt": FOREACH_TRAFFIC,
    "nemo-automodel": FOREACH_TRAFFIC,
    "torchtune": FUSED_TRAFFIC,
    "torchtitan": FUSED_TRAFFIC,
    "deepspeed": FUSED_TRAFFIC,
}
ENOUGH_ROWS = 40
"""From which on a trainer's own rows decide its scatter."""


def own(rows: Sequence[Comparison], name: str) -> list[Comparison]:
    """Return the rows of one trainer."""
    return [row for row in rows if row.part.startswith(f"{name} ")]


def scatter(rows: Sequence[Comparison], name: str, *, known: float = 0.0) -> float:
    """Return the standard deviation of ln(published / predicted) of a trainer, less what is known
    of the variance: of few rows, that of all trainers, each with the same weight.
    """
    logs: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        logs[row.part.partition(" ")[0]].append(row.log_ratio)
    enough = len(logs.get(name, [])) >= ENOUGH_ROWS
    sd = (
        conformal_sd(np.array(logs[name]))
        if enough
        else weighted_sd([np.array(each) for each in logs.values()])
    )
    return float(f"{math.sqrt(max(sd**2 - known, 0.0)):.2g}")


def inherited(name: str) -> FrameworkEfficiency:
    """Return a trainer's constants without its own scatter: torch-fsdp's on A100, and what the
    trainer's code decides.
    """
    base = efficiency(gpu=gpu("a100-sxm-80gb"), framework="torch-fsdp").framework
    return dataclasses.replace(
        base,
        framework=name,
        elementwise_traffic_factor=1.0,
        narrow_traffic_factor=None,
        tuning_log_sd=0.0,
        tuning_memory_log_sd=0.0,
        attention_kernels={},
        host_launch_s=HOST_LAUNCH_S,
        optimizer_traffic_factor=OPTIMIZERS[name],
        earlier_expert_time_log_sd=None,
    )


def fitted(folder: Path) -> Iterator[FittedFile]:
    times, peaks, mixtures = (
        trainers.step_times(folder, experts=False),
        trainers.peaks(folder, experts=False),
        trainers.step_times(folder, experts=True),
    )
    of_adapters = doubts().lora_log_sd ** 2
    for name in OPTIMIZERS:
        time = scatter(times, name)
        profile = dataclasses.replace(
            inherited(name),
            time_log_sd=time,
            expert_time_log_sd=scatter(mixtures, "all", known=time**2 + of_adapters),
            pair_log_sd=time,
            expert_pair_log_sd=time,
            memory_log_sd=scatter(peaks, name),
            fitted_on=f"torch-fsdp on A100 and counts of eager kernels; scatter of "
            f"{len(own(times, name))} step times and {len(own(peaks, name))} peaks of its own by "
            f"{COMMAND}, of all trainers where these are fewer than {ENOUGH_ROWS}",
        )
        yield framework_file("default", profile, keeps=())
