"""Disaggregated serving: two pools of replicas, what is asked of them, and what an answer says."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.domain.fields import Strict
from hp_tool.domain.result import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig(Strict):
    """Replicas that are alike."""

    gpu: str
    tensor_parallel_size: int
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEstimate:
    """A prediction for a pair of pools under one load. Means over requests."""

    feasible: bool
    reasons: tuple[Reason, ...] = ()
    ttft_s: float
    """Waiting for prefill, prefill, and the transfer of keys and values."""
    tpot_s: float
    request_latency_s: float
    transfer_s: float
    """Of one prompt's keys and values; within ttft_s."""
    request_rate_per_second: float
    output_tokens_per_second_per_gpu: float
    """By the devices of both pools."""
    num_gpus: int
    prefill_busy: float
    """Share of the time that a prefill replica works: near 1 it bounds the rate."""
    decode_batch: float
    """Requests that a decoding replica serves at once."""
    max_decode_batch: float
    """The most it has room for."""
    cost_per_million_output_tokens: float | None = None
    """US dollars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecommendation:
    """One pair of pools, best first."""

    rank: int
    prefill: PoolConfig
    decode: PoolConfig
    estimate: PoolEstimate
