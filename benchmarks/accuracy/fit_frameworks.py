"""Fit what a framework adds to isolated kernels: `python -m benchmarks.accuracy.fit_frameworks --data DIR`.

Writes hp_tool/catalog/data/efficiency/frameworks/megatron-core.yaml. Five constants on the 19 figures of arXiv 2205.05198's
Tables 4 and 5, with priors that keep them physical; `fit(..., leave_out=MODEL)` fits without one model's Table 5 rows.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.optimize import least_squares

import hp_tool
from benchmarks.accuracy.data import Row, add_data_argument, data_folder, read
from benchmarks.accuracy.korthikanti import GPU, MODELS, Comparison, table4, table5
from hp_tool.catalog.efficiency import gpu_efficiency
from hp_tool.domain.efficiency import EfficiencyProfile, FrameworkEfficiency, Link

Floats = NDArray[np.float64]

OUTPUT = Path(hp_tool.__file__).parent / "catalog/data/efficiency/frameworks"

PRIORS = {
    # name: (mean, standard deviation, lowest, highest)
    "matmul_slowdown": (1.05, 0.08, 0.8, 2.0),
    "elementwise_traffic_factor": (1.2, 0.3, 0.5, 4.0),
    "tensor_parallel_overlap": (0.5, 0.4, 0.0, 1.0),
    "optimizer_traffic_factor": (1.3, 0.3, 0.5, 5.0),
    "network_bandwidth_fraction": (0.7, 0.2, 0.1, 1.0),
}
NOISE = 0.03
"""Relative scatter taken for one published figure; it sets the figures against the priors."""

FIXED = FrameworkEfficiency(
    framework="megatron-core",
    matmul_slowdown=1.0,
    elementwise_traffic_factor=1.0,
    attention_backward_slowdown=1.25,  # FlashAttention-2 and -3 reach 1.2 to 1.3 times their backward FLOP/s forward
    tensor_parallel_overlap=0.0,
    tensor_parallel_forward_overlap=0.0,  # these runs wait for their forward collectives
    context_parallel_overlap=0.9,  # ring attention: the transfer runs beside the attention of the step before
    expert_parallel_overlap=0.0,  # Megatron Core's default dispatcher waits for its all-to-all
    data_parallel_overlap=0.0,  # these runs reduce gradients after the backward pass
    pipeline_overlap=0.0,
    network=Link(bandwidth_fraction=0.7, latency_s=1e-5, latency_per_peer_s=2e-6, ramp_bytes=1.4e7),
    optimizer_traffic_factor=1.0,
    step_overhead_s=0.0,
    time_log_sd=0.08,
    memory_log_sd=0.03,
    fragmentation_fraction=0.03,
    fitted_on="",
)
"""What these rows do not tell, and where the values come from."""


def framework(x: Floats) -> FrameworkEfficiency:
    """The profile with the fitted constants in the order of PRIORS."""
    values = dict(zip(PRIORS, (float(f"{v:.4g}") for v in x), strict=True))
    link = dataclasses.replace(FIXED.network, bandwidth_fraction=values.pop("network_bandwidth_fraction"))
    return dataclasses.replace(FIXED, network=link, **values)


def compare(rows4: list[Row], rows5: list[Row], profile: EfficiencyProfile) -> list[Comparison]:
    return table4(rows4, profile) + table5(rows5, profile)


def fit(folder: Path, *, leave_out: str | None = None) -> EfficiencyProfile:
    """Maximum a posteriori fit; `leave_out` names a model of Table 5 whose rows are not seen."""
    rows4 = read(folder, "korthikanti2022_table4.csv")
    rows5 = [row for row in read(folder, "korthikanti2022_table5.csv") if row["model"].split()[0] != leave_out]
    device = gpu_efficiency(GPU)
    mean, sd, low, high = (np.array(column) for column in zip(*PRIORS.values(), strict=True))

    def residuals(x: Floats) -> Floats:
        found = compare(rows4, rows5, EfficiencyProfile(gpu=device, framework=framework(x)))
        return np.concatenate([[np.log1p(c.error) / NOISE for c in found], (x - mean) / sd])

    x = least_squares(residuals, mean, bounds=(low, high), diff_step=1e-3).x
    return EfficiencyProfile(gpu=device, framework=framework(x))


def leave_one_out(folder: Path) -> list[Comparison]:
    """Every Table 5 figure, predicted by constants that never saw its model's Table 5 rows."""
    rows = read(folder, "korthikanti2022_table5.csv")
    return [
        comparison
        for size in MODELS
        for comparison in table5([row for row in rows if row["model"].split()[0] == size], fit(folder, leave_out=size))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_argument(parser)
    folder = data_folder(parser.parse_args())
    if folder is None:
        return
    found = dataclasses.replace(
        fit(folder).framework,
        fitted_on="Tables 4 and 5 of arXiv 2205.05198 (A100, 19 figures) by python -m benchmarks.accuracy.fit_frameworks; "
        "see FIXED there for what those rows do not tell",
    )
    OUTPUT.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(dataclasses.asdict(found), sort_keys=False, width=120)
    path = OUTPUT / f"{found.framework}.yaml"
    path.write_text(f"# Written by python -m benchmarks.accuracy.fit_frameworks; do not edit by hand.\n{text}")
    print(text)
    errors = [abs(c.error) for c in leave_one_out(folder)]
    print(f"Table 5 leaving one model out: mean {np.mean(errors):.2%}, worst {max(errors):.2%}")


if __name__ == "__main__":
    main()
