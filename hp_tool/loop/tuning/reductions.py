"""Cheapest reduced runs of configurations: fewer replicas, micro-batches and layers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.legality import legality
from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import Reducible
from hp_tool.loop.calibration import layer_passes, residual_features
from hp_tool.loop.learning.evidence import reduced_problem
from hp_tool.loop.search.fidelity import (
    Reduction,
    fewest_micro_batches,
    fewest_replicas,
    num_gpus,
    num_micro_batches,
)
from hp_tool.questions.training.problem import TrainingProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Reducer:
    """Find reduced runs of a problem's configurations, for at most `available_gpus` devices."""

    problem: TrainingProblem
    available_gpus: int
    cores: float = math.inf
    """Cores of a host whose processes stand for devices. More processes than cores share them; GPUs
    are not shared.
    """
    kinds: tuple[Reducible, ...] = get_args(Reducible)
    """Kinds of reductions that a run may use."""

    def __call__(self, parallel: ParallelConfig) -> Reduction | None:
        """Return the cheapest legal reduction that fits; None if only a complete run will do."""
        for fidelity in self._fidelities(parallel):
            reduction = self._reduction(parallel, fidelity)
            if reduction is not None:
                return reduction
        return None

    def _fidelities(self, parallel: ParallelConfig) -> Iterator[Fidelity]:
        """Yield fidelities, cheapest first.

        On the fewest replicas, all layers come before fewer layers. More replicas follow.
        """
        d, layers = parallel.data_parallel_size, self.problem.model.num_hidden_layers
        whole_m = num_micro_batches(self.problem.workload, parallel)
        m = (
            fewest_micro_batches(self.problem.workload, parallel)
            if "micro_batches" in self.kinds
            else whole_m
        )
        one = Candidates.from_configs([parallel])
        fewest = (
            int(_fewest_replicas(one, problem=self.problem)[0]) if "replicas" in self.kinds else d
        )
        fewer = (layers // 2, layers // 4) if "layers" in self.kinds else ()
        chunks = parallel.pipeline_parallel_size * parallel.virtual_pipeline_parallel_size
        for replicas in (k for k in range(fewest, d + 1) if d % k == 0):
            for kept in (layers, *(k for k in fewer if k and k % chunks == 0)):
                fidelity = Fidelity(
                    num_hidden_layers=kept if kept < layers else None,
                    data_parallel_size=replicas if replicas < d else None,
                    num_micro_batches=m if m < whole_m else None,
                )
                if not fidelity.is_whole:
                    yield fidelity

    def _reduction(self, parallel: ParallelConfig, fidelity: Fidelity) -> Reduction | None:
        devices = num_gpus(parallel, fidelity)
        if devices > self.available_gpus:
            return None
        problem, config = reduced_problem(self.problem, parallel=parallel, fidelity=fidelity)
        one = Candidates.from_configs([config])
        code = legality(case=problem, candidates=one)
        if code[0]:
            return None
        costs = problem.costs(one)
        if not costs.feasible[0]:
            return None
        crowding = max(1.0, num_gpus(parallel) / self.cores) / max(1.0, devices / self.cores)
        return Reduction(
            fidelity=fidelity,
            num_gpus=devices,
            parts_s=costs.parts_without_retries,
            layer_passes=layer_passes(case=problem, candidates=one),
            features=residual_features(case=problem, candidates=one),
            crowding=crowding,
        )


def _fewest_replicas(candidates: Candidates, *, problem: TrainingProblem) -> NDArray[np.int64]:
    """Return the number of replicas in each candidate's smallest reduced run, shape (n,).

    It is the full number if ZeRO shards over a part of the replicas.
    """
    d = candidates.data_parallel_size
    kept = fewest_replicas(
        candidates, data_parallel_size=d, gpus_per_node=problem.cluster.gpus_per_node
    )
    return np.where(candidates.data_parallel_shard_size > 0, d, kept)


def fewest_gpus(candidates: Candidates, *, problem: TrainingProblem) -> NDArray[np.int64]:
    """Return the number of devices in each candidate's smallest reduced run, shape (n,)."""
    c = candidates
    ranks = c.tensor_parallel_size * c.pipeline_parallel_size * c.context_parallel_size
    return np.asarray(ranks * _fewest_replicas(c, problem=problem))
