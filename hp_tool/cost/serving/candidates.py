"""Serving candidates as arrays, and the case that they share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import FloatArray, IntArray, Ints
from hp_tool.cost.case import Machine
from hp_tool.domain.efficiency import ExpertKernel
from hp_tool.domain.engines import ISOLATED_EXPERTS, EngineEfficiency, ExpertEfficiency
from hp_tool.domain.hardware import Precision
from hp_tool.domain.inference import SpeculativeSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.serving import ServingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCandidates:
    """n serving configurations, each with its load. Fields have shape (n,). All fields except
    `concurrency` are those of ServingConfig.
    """

    tensor_parallel_size: IntArray
    pipeline_parallel_size: IntArray
    expert_parallel_size: IntArray
    attention_data_parallel_size: IntArray
    redundant_experts: IntArray
    data_parallel_size: IntArray
    max_num_seqs: IntArray
    max_num_batched_tokens: IntArray
    concurrency: IntArray
    """Requests in flight on all GPUs."""

    def __len__(self) -> int:
        return len(self.tensor_parallel_size)

    @property
    def schedulers(self) -> IntArray:
        """Return the number of schedulers, which batch requests independently: one per attention
        group.
        """
        return self.data_parallel_size

    @property
    def replicas(self) -> IntArray:
        return self.data_parallel_size // self.attention_data_parallel_size

    @property
    def devices(self) -> IntArray:
        """Return the total number of devices of all replicas."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def take(self, indices: NDArray[np.intp] | slice) -> ServingCandidates:
        """Return the rows at `indices`, in that order."""
        return ServingCandidates(**{f.name: getattr(self, f.name)[indices] for f in fields(self)})

    def with_concurrency(self, concurrency: FloatArray) -> ServingCandidates:
        """Return the same configurations with another load. It may be fractional."""
        return replace(self, concurrency=cast(IntArray, concurrency))

    def config(self, index: int) -> ServingConfig:
        """Return the configuration of one row."""
        return ServingConfig(
            **{name: int(getattr(self, name)[index]) for name in ServingConfig.__slots__}
        )

    @classmethod
    def from_configs(
        cls, configs: Iterable[ServingConfig], *, concurrency: Iterable[int]
    ) -> ServingCandidates:
        """Return one row per configuration, in order, with its load."""
        rows = list(configs)
        columns = {
            name: np.array([getattr(row, name) for row in rows], dtype=np.int64)
            for name in ServingConfig.__slots__
        }
        return cls(**columns, concurrency=np.array(list(concurrency), dtype=np.int64))


def default_max_num_seqs(engine: EngineEfficiency, groups: Ints) -> IntArray:
    """Return the engine's default `max_num_seqs` for a replica with the given number of attention
    groups.
    """
    limit = engine.replica_max_num_seqs
    each = engine.max_num_seqs if limit is None else np.maximum(limit // groups, 1)
    return each + 0 * np.asarray(groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """A separate draft model on the ranks of each replica."""

    model: ModelSpec
    """The draft model. Its layers cache every token, in the precision of the target model's
    cache.
    """
    layer_bytes: float
    """Bytes per weight of the layers."""
    end_weights: float
    """Number of weights outside the layers, which are stored in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCase(Machine):
    """Model, machine, engine, number formats and request lengths of a serving query.

    Of the framework's profile, only the network between nodes is used.
    """

    model: ModelSpec
    engine: EngineEfficiency
    compute_precision: Precision
    """Input precision of the layers' matmuls."""
    weight_bytes: float
    """Bytes per weight of the layers' matmuls, including scales; the embedding and the output layer
    stay in 16 bits.
    """
    mixer_precision: Precision
    """Input precision of the matmuls of attention and other token mixers."""
    mixer_bytes: float
    """Bytes per weight of the token mixers' matmuls. This is more than `weight_bytes` if the
    checkpoint stores attention in 16 bits.
    """
    expert_precision: Precision
    """Input precision of the experts' matmuls."""
    expert_bytes: float
    """Bytes per weight of the experts, including shared ones."""
    kv_element_bytes: float
    """Bytes per element of the KV cache."""
    input_length: int
    """Prompt tokens (I)."""
    output_length: int
    """Generated tokens (O); the prefill generates the first one."""
    prefix_cache_hit_rate: float = 0.0
    """Fraction of prompt tokens whose keys and values are cached from earlier requests."""
    prefix_groups: float = math.inf
    """Number of different prefixes among the requests; the cache stores each prefix once."""
    speculative: SpeculativeSpec | None = None
    drafter: Drafter | None = None
    """None if tokens are drafted from n-grams, by the model's own layers or assistant, or by a
    model of unknown size.
    """
    prefill_group: float = 1.0
    """Number of requests in a group whose prompts are all prefilled before the first token of any
    of them, in a steady load. inf: as many requests as finish in one pass.
    """
    wave_share: float = 0.0
    """Fraction of the requests that start together, such as the first requests of a closed load."""
    slowdown: float = 1.0
    """Duration of this engine's passes divided by that of the same engine with tuned settings."""
    experts: ExpertEfficiency = ISOLATED_EXPERTS
    """Constants of the engine's MoE layers."""
    expert_kernels: Mapping[str, ExpertKernel] = field(default_factory=dict)
    """The engine's kernels for routed experts on this GPU type, by weight format. If empty, experts
    run like other matmuls.
    """
    expert_imbalance: float | None = None
    two_batch_overlap: bool | None = None
    longest_request: int = 0
    """Maximum number of tokens of a prompt and its answer."""
    room_at_start: int = 0
    """Number of tokens of a request that must fit in the cache for the engine to start. 0: no such
    requirement.
    """
    independent: bool = False
    """Whether the GPU and the front end work without waiting for each other. They do if requests
    arrive at random times. In a closed loop, each request starts when another ends, so they wait.
    """

    @property
    def computed_length(self) -> float:
        """Return the number of prompt tokens that prefill computes because they are not in the
        prefix cache.
        """
        return (1.0 - self.prefix_cache_hit_rate) * self.input_length

    def with_layers(self, kind: ModelSpec) -> Self:
        """Return the case with a model that has only layers of one kind (`ModelSpec.kinds`)."""
        return self if kind is self.model else replace(self, model=kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward pass of a scheduler, or of one of its pipeline micro-batches. Arrays have shape
    (n,).
    """

    tokens: FloatArray
    """Rows of the matmuls: tokens of decoding sequences and of prompts."""
    decoding: FloatArray
    """Number of sequences that decode one token."""
    prefill_requests: FloatArray
    """Number of prompts processed; a chunk of half a prompt counts 0.5."""
    routed: FloatArray | None = None
    """Rows that reach the experts, averaged over the attention groups of a stage. None: `tokens` in
    each group.
    """
    drafted: int = 0
    """Number of drafted tokens to verify per decoding sequence, in addition to its next token.
    `tokens` includes them.
    """
