"""Predict the savings of sequence parallelism and selective recomputation for GPT-3 175B, trained
on 300B tokens with 1,024 A100.

    python examples/headline_figures.py

arXiv 2205.05198 reports that both together reduce activation memory about fivefold compared with
tensor parallelism alone, and remove most of the overhead of full recomputation. The 34 days that
are often quoted for full recomputation refer to software of 2021. This example uses software of
2022 for all layouts.
"""

from __future__ import annotations

from pathlib import Path

import hp_tool

QUERY = Path(__file__).parent / "gpt3-175b.yaml"
LAYOUTS = {
    "tensor parallel only": {"recompute": "none", "sequence_parallel": False},
    "and sequence parallel": {"recompute": "none", "sequence_parallel": True},
    "and selective recomputation": {"recompute": "selective", "sequence_parallel": True},
    "instead, full recomputation": {"recompute": "full", "sequence_parallel": False},
}


def figures() -> dict[str, dict[str, float]]:
    """Return for each layout the GiB of activations and of all memory, seconds per step, days,
    GPU-hours and dollars.
    """
    rows = {}
    for name, parallel in LAYOUTS.items():
        found = hp_tool.estimate(QUERY, parallel=parallel).estimate
        assert isinstance(found, hp_tool.Estimate) and found.memory and found.time
        assert found.days and found.gpu_hours and found.cost
        rows[name] = {
            "activations_gib": found.memory.layer_activations_bytes / 2**30,
            "memory_gib": found.memory.total_bytes / 2**30,
            "fits": float(found.feasible),
            "step_s": found.time.step_s,
            "days": found.days,
            "gpu_hours": found.gpu_hours,
            "dollars": found.cost,
        }
    return rows


def main() -> None:
    rows = figures()
    for name, row in rows.items():
        fits = "" if row["fits"] else "  (does not fit)"
        print(
            f"{name:28} activations {row['activations_gib']:5.1f} GiB of {row['memory_gib']:5.1f}  "
            " "
            f"step {row['step_s']:5.2f} s   {row['days']:4.1f} days   "
            f"{row['gpu_hours']:9,.0f} GPU-hours   ${row['dollars']:,.0f}{fits}"
        )
    plain, both, full = (
        rows[name]
        for name in (
            "tensor parallel only",
            "and selective recomputation",
            "instead, full recomputation",
        )
    )
    print(
        f"activations {plain['activations_gib'] / both['activations_gib']:.1f}x smaller; against "
        "full recomputation "
        f"{full['days'] - both['days']:.1f} days, {full['gpu_hours'] - both['gpu_hours']:,.0f} "
        "GPU-hours and "
        f"${full['dollars'] - both['dollars']:,.0f} saved"
    )


if __name__ == "__main__":
    main()
