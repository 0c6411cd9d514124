"""Fit which configurations stall, and score predictions of stalls for other models: `python -m
benchmarks.search.stalls [--grid FILE.csv]`.

Fits the share of runs that stall as exp(alone + pipeline x [it crosses nodes] + nodes x
log2(nodes) + held x [so many nodes that the cost model has messages stall]) on a grid's cells.
Pipelines on that many nodes have the stalls in their prediction and are left out. Printed are
STALL_RISK's constants, the same beside the share that the cost model states. The losses (nats a
run) are those of a model left out: by one share for all, by kind, and with a few runs of the cell
known, for several WEIGHTs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from benchmarks.search.grid import add_grid_argument, read_grid
from benchmarks.search.profiles import profiles_without
from benchmarks.search.replaying import legal_rows, table_of
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import STATED, STEP_LOG_SD, FloatArray, scale_features

STALLED = 0.4
"""Minimum ln(measured / predicted) of a run that counts as stalled."""
KNOWN = (3, 10)
"""Number of known runs in a cell, drawn anew SEEDS times."""
SEEDS = 6
WEIGHTS = (0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The runs of one cell, and which of them stalled."""

    model: str
    usual: float
    """Fraction of runs that stall, as stated by the cost model."""
    kinds: FloatArray
    """(n, 4) features: 1, whether a pipeline crosses nodes, log2(nodes), and whether messages
    stall.
    """
    points: FloatArray
    stalled: FloatArray

    def shares(self, constants: FloatArray) -> FloatArray:
        """Return the stall probabilities for these constants, shape (n,)."""
        return np.clip(
            np.exp(self.kinds[:, : len(constants)] @ constants),
            assumed().stalls.unseen_share,
            assumed().step_time.stall_share_limit,
        )


def cells_with_predictions(grid: Path, **where: Any) -> list[Seen]:
    """Return the cells with predictions by constants that were fitted without the cell's model."""
    profiles = profiles_without(grid=grid, gpu=where["gpu"], framework=where["framework"])
    cells = []
    for cell in read_grid(grid, shapes={}, **where)[0]:
        table, rows = table_of(cell, profiles.of(cell.model.name)), legal_rows(cell)
        rows = rows[np.isfinite(cell.step_s[rows])]
        held = cell.cluster.num_nodes > profiles.stock.framework.message_stall_nodes
        if held:
            rows = rows[table.take(rows).features["pipeline_crosses_nodes"] == 0.0]
        features, predicted_s = table.take(rows).features, sum(table.take(rows).parts_s.values())
        nodes = np.full(len(rows), np.log2(cell.cluster.num_nodes))
        crosses = features["pipeline_crosses_nodes"]
        cells.append(
            Seen(
                model=cell.model.name,
                usual=(
                    float(np.mean(features[STEP_LOG_SD] ** 2))
                    - assumed().step_time.regular_log_sd_limit ** 2
                )
                / (2.0 * assumed().stalls.mean_log_excess ** 2),
                kinds=np.stack([np.ones_like(nodes), crosses, nodes, held + 0.0 * nodes], axis=1),
                points=scale_features(features, sorted(set(features) - STATED)),
                stalled=(np.log(cell.step_s[rows] / predicted_s) > STALLED).astype(float),
            )
        )
    return cells


def loss(shares: FloatArray, stalled: FloatArray) -> float:
    """Return the mean negative log likelihood of the runs, in nats per run."""
    return -float(np.mean(stalled * np.log(shares) + (1.0 - stalled) * np.log1p(-shares)))


def fit(cells: list[Seen], *, by_kind: bool = True) -> FloatArray:
    """Fit the constants, shape (4,), or one common share, shape (1,)."""
    stalled, start = (
        np.concatenate([cell.stalled for cell in cells]),
        np.array([-1.5, 0.0, 0.0, 0.0])[: 4 if by_kind else 1],
    )

    def unlikely(constants: FloatArray) -> float:
        shares = np.concatenate([cell.shares(constants) for cell in cells])
        return len(stalled) * loss(shares, stalled) + 0.25 * float(np.sum(constants[1:] ** 2))

    fitted: FloatArray = minimize(
        unlikely, start, method="Nelder-Mead", options={"maxiter": 4000}
    ).x
    return fitted


def loss_knowing(cell: Seen, constants: FloatArray, *, weight: float) -> float:
    """Return the loss on the runs of a cell that are not known, given those that are."""
    rng, usual = np.random.default_rng(0), cell.shares(constants)
    apart = ((cell.points[:, None] - cell.points) ** 2).sum(axis=2)
    near, losses = np.exp(-0.5 * apart / assumed().stalls.distance ** 2), []
    for known in [
        rng.permutation(len(usual))[:size]
        for size in KNOWN
        if len(usual) > 2 * size
        for _ in range(SEEDS)
    ]:
        rest = np.setdiff1d(np.arange(len(usual)), known)
        before = assumed().stalls.share_runs * float(
            usual[known].mean()
        )  # a gamma prior that has seen so many usual runs
        more = (before + cell.stalled[known].sum()) / (before + usual[known].sum())
        prior, close = (
            np.minimum(more * usual[rest], assumed().step_time.stall_share_limit),
            near[np.ix_(rest, known)],
        )
        shares = (weight * prior + close @ cell.stalled[known]) / (weight + close.sum(axis=1))
        losses.append(loss(np.clip(shares, 1e-3, 1.0 - 1e-3), cell.stalled[rest]))
    return float(np.mean(losses))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_grid_argument(parser)
    where = {"gpu": "h100-sxm-80gb", "sequence_length": 4096, "framework": "nanotron"}
    cells = cells_with_predictions(parser.parse_args().grid, **where)
    models = sorted({cell.model for cell in cells})
    everything = fit(cells)
    answer: dict[str, Any] = {
        "constants": (everything - [np.log(cells[0].usual), 0.0, 0.0, 0.0]).round(2).tolist(),
        "left_out": {},
    }
    for model in models:
        own, others = (
            [cell for cell in cells if (cell.model == model) == mine] for mine in (True, False)
        )
        rows = np.concatenate([cell.stalled for cell in own])
        constants = {kind: fit(others, by_kind=kind) for kind in (True, False)}
        answer["left_out"][model] = {
            "one_share": loss(
                np.concatenate([cell.shares(constants[False]) for cell in own]), rows
            ),
            "by_kind": loss(np.concatenate([cell.shares(constants[True]) for cell in own]), rows),
            "by_weight": {
                w: float(np.mean([loss_knowing(cell, constants[True], weight=w) for cell in own]))
                for w in WEIGHTS
            },
        }
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
