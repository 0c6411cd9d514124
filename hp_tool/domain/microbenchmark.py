"""Single operations timed on a cluster: what is asked, and how long each rank took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hp_tool.domain.fields import Strict
from hp_tool.domain.hardware import Precision

LocalOperation = Literal["matmul", "attention", "add", "activation", "norm", "loss"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Strict):
    """One operation of one size. All ranks do it at the same time, as in training."""

    name: LocalOperation | Collective
    shape: tuple[int, ...]
    """matmul: m, n, k. attention, causal, forward: sequences, length, query heads, key/value heads, head_dim. add, and forward
    and backward of activation: elements. norm and loss, forward and backward: rows, columns. Collectives: bytes of the whole
    buffer, as NCCL's tests count them."""
    precision: Precision = "fp32"
    group_size: int = 1
    """Collectives: ranks of a group; the ranks are dealt out into as many groups, which all work at once."""
    stride: int = 1
    """Collectives: 1: neighbouring ranks; the devices of a node: groups that have one rank on each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTimes(Strict):
    """An operation and each rank's mean seconds."""

    operation: Operation
    seconds_per_rank: tuple[float, ...]
