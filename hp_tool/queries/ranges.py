"""Smallest and largest values of a query's numbers."""

from __future__ import annotations

from typing import Any

from hp_tool import bounds
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query, Targets
from hp_tool.domain.reliability import ReliabilitySpec
from hp_tool.errors import InputError

_COUNT = (1, 1 << 31)
_AMOUNT = (1e-9, 1e18)
_FRACTION = (0.0, 0.99)
_RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "training": {
        "sequence_length": _COUNT,
        "decoder_sequence_length": _COUNT,
        "global_batch_size": _COUNT,
        "total_tokens": (1.0, 1e18),
        "dropout": _FRACTION,
        "offload_fraction": (1e-3, 1.0),
        "expert_imbalance": (1.0, 1e6),
        "expert_capacity_factor": (1e-3, 1e6),
    },
    "inference": {
        "input_length": _COUNT,
        "output_length": _COUNT,
        "concurrency": _COUNT,
        "request_rate_per_second": _AMOUNT,
        "prefix_cache_hit_rate": _FRACTION,
    },
    "inference.disaggregated": {"prefill_replicas": _COUNT, "decode_replicas": _COUNT},
    "inference.speculative": {
        "num_speculative_tokens": (1, 64),
        "acceptance_rate": (0.0, 1.0),
        "draft_cost_fraction": (0.0, 10.0),
    },
    "constraints": {"max_days": _AMOUNT, "max_cost": _AMOUNT, "memory_headroom_fraction": _FRACTION},
    "search": {
        "budget_runs": (1, 100_000),
        "budget_gpu_seconds": _AMOUNT,
        "run_timeout_s": (1e-3, 1e7),
        "steps": (1, 100_000),
        "warmup_steps": (0, 100_000),
        "step_tolerance_fraction": _FRACTION,
        "hopeless_factor": (1.0, 1e6),
        "parallel_runs": (1, 64),
        "min_gain_fraction": _FRACTION,
        "seed": (0, (1 << 32) - 1),
    },
    "targets": dict.fromkeys(Targets.__slots__, _AMOUNT),
}
"""Smallest and largest value: wide enough for anyone's work, narrow enough that no formula overflows."""
BUDGET_RANGES = {name: _RANGES["search"][name] for name in ("budget_runs", "budget_gpu_seconds")}
"""Of what may change while a search runs."""
_PARALLEL_SIZE = (1, 1 << 20)
_PARALLEL_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys((name for name in ParallelQuery.__slots__ if name.endswith("_size")), _PARALLEL_SIZE),
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens"), _PARALLEL_SIZE),
    "zero_stage": (0, 3),
    "data_parallel_shard_size": (0, _PARALLEL_SIZE[1]),
}
_RELIABILITY = {
    "mtbf_per_gpu_hours": (1e-3, 1e12),
    "checkpoint_s": (1e-3, 1e7),
    "checkpoint_interval_s": (1e-3, 1e9),
    "restart_s": (0.0, 1e7),
}


def check_ranges(query: Query) -> None:
    """Every number of the query in its range, no empty list. Raises InputError."""
    for section, limits_of in _RANGES.items():
        values: Any = query
        for name in section.split("."):
            values = getattr(values, name, None)
        for name, limits in limits_of.items() if values is not None else ():
            if (value := getattr(values, name)) is not None:
                check_range(value, limits, field=f"{section}.{name}")
    if query.training is not None and query.training.reliability is not None:
        check_reliability(query.training.reliability, field="training.reliability")
    check_parallel(query.parallel)
    if query.inference is not None and (pools := query.inference.disaggregated) is not None:
        for name in pools.__slots__:
            _check_length(getattr(pools, name), field=f"inference.disaggregated.{name}")


def check_range(value: float | None, limits: tuple[float, float], *, field: str) -> None:
    """Raises InputError where a value is given and outside."""
    low, high = limits
    if value is not None and not low <= value <= high:  # not: NaN is in no range
        ends = " to ".join(f"{end:,}" if isinstance(end, int) else f"{end:g}" for end in limits)
        raise InputError(f"{field} must be from {ends}, got {value}", field=field, code="invalid_value")


def check_reliability(reliability: ReliabilitySpec, *, field: str) -> None:
    """Raises InputError where a time is outside of what formulas take."""
    for name, limits in _RELIABILITY.items():
        check_range(getattr(reliability, name), limits, field=f"{field}.{name}")


def check_parallel(parallel: ParallelQuery) -> None:
    """Sizes in range, no empty list, none too long. Raises InputError."""
    for name in parallel.__slots__:
        value = getattr(parallel, name)
        if value is None:
            continue
        if value == ():
            raise InputError(
                f"parallel.{name} is an empty list; give values or leave it out", field=f"parallel.{name}", code="invalid_value"
            )
        _check_length(value, field=f"parallel.{name}")
        if (limits := _PARALLEL_RANGES.get(name)) is None:
            continue
        for one in value if isinstance(value, tuple) else (value,):
            check_range(one, limits, field=f"parallel.{name}")


def _check_length(value: object, *, field: str) -> None:
    if isinstance(value, tuple):
        bounds.check_values(len(value), field=field)
