"""Seconds of single micro-batches that differ in tokens, in attention and in context-parallel size."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_tool.cost.arrays import FloatArray, IntArray
from hp_tool.cost.block import shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.embedding_and_head import head_time
from hp_tool.cost.layer import layer_time
from hp_tool.cost.recomputation import recomputed_layer_fraction, recomputed_seconds
from hp_tool.cost.training import training_costs
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import DEFAULT_STRATEGY, ParallelConfig, Strategy
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import UnsupportedError

_ONCE_A_STEP = ("pipeline_bubble", "pipeline_p2p", "data_parallel", "optimizer", "offload", "overhead")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchClock:
    """What a configuration's stages take for packed micro-batches; workload.sequence_length is the static row."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: TrainingWorkload
    profile: EfficiencyProfile
    config: ParallelConfig
    strategy: Strategy = DEFAULT_STRATEGY

    def __post_init__(self) -> None:
        if self.model.num_experts:
            raise UnsupportedError("micro-batches of unequal size are modelled for dense models only", field="model")
        if self.workload.attention == "unfused":
            raise UnsupportedError("packed rows need attention: flash", field="training.attention")

    def seconds(self, *, sizes: IntArray, tokens: FloatArray, squares: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(n,) seconds, forward, backward and recomputation, of the stage that sets the pace, and of one between the ends.

        `sizes` are context-parallel sizes, `tokens` the micro-batch's tokens over all its ranks, `squares` the sum of l^2
        over its sequences. Embedding and output layer grow with the tokens.
        """
        columns = {name: np.full(len(sizes), value) for name, value in dataclasses.asdict(self._alone).items()}
        candidates = Candidates(**columns | {"context_parallel_size": sizes})
        plain = shapes(model=self.model, workload=self.workload, candidates=candidates)
        s = dataclasses.replace(plain, tokens=tokens / sizes, attended=squares / tokens)
        layer = layer_time(**self._machine, candidates=candidates, strategy=self.strategy, s=s)
        layers = self.model.num_hidden_layers / candidates.pipeline_parallel_size
        whole = recomputed_layer_fraction(candidates, layers_per_chunk=layers / candidates.virtual_pipeline_parallel_size)
        forward = layer.forward + layer.tensor + layer.context
        again = recomputed_seconds(candidates, layer=layer, forward=forward, whole=whole)
        passes = layer.forward + layer.backward + layer.tensor + layer.tensor_backward + layer.context + layer.context_backward
        between = np.asarray(layers * (passes + again))
        return between + self._end_seconds_per_token() * s.tokens, between

    @property
    def fill(self) -> float:
        """(p-1)/v: how often the longest micro-batch counts once more while the pipeline fills and drains."""
        return (self.config.pipeline_parallel_size - 1) / self.config.virtual_pipeline_parallel_size

    def once_a_step_s(self) -> float:
        """Seconds of a step that do not depend on how sequences are arranged; of the bubble, the ends and transfers."""
        parts = training_costs(**self._machine, candidates=self._alone, strategy=self.strategy).parts
        row = float(self.workload.sequence_length)
        _, between = self.seconds(
            sizes=np.array([self.config.context_parallel_size]), tokens=np.array([row]), squares=np.array([row**2])
        )
        return float(sum(parts[name] for name in _ONCE_A_STEP) - self.fill * between[0])

    @property
    def _alone(self) -> Candidates:
        return Candidates.alone(self.config)

    @property
    def _machine(self) -> dict[str, Any]:
        return {"model": self.model, "cluster": self.cluster, "workload": self.workload, "profile": self.profile}

    def _end_seconds_per_token(self) -> float:
        head = head_time(**self._machine, candidates=self._alone)
        ends = (float(head.embedding), float(head.output + head.output_communication))
        seconds = max(ends) if self.config.pipeline_parallel_size > 1 else sum(ends)
        return seconds * self.config.context_parallel_size / self.workload.sequence_length / self.config.micro_batch_size
