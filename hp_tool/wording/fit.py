"""Chances and intervals in words: how a configuration fits, and what would narrow the interval of
its step time.
"""

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass

from hp_tool.domain.knobs import FREE
from hp_tool.domain.result import Estimate
from hp_tool.domain.units import GIB, duration, gib, times

LEAST = 1e-4
NAMES = {
    "training.framework_version": "the release",
    "training.cuda_graphs": "that kernels are recorded",
}
"""Keys of a query as people call them."""
KNOBS = {
    "training.cuda_graphs": "CUDA graphs",
    "training.gradient_precision": "{} gradients",
    "training.parameter_precision": "{} parameters",
    "training.cross_entropy": "loss {}",
    "training.overlap": "overlap {}",
    "training.fp8_recipe": "{} scaling",
    "training.optimizer_precision": "{} moments",
    "training.offload": "offloaded {}",
    "training.frozen_precision": "frozen weights in {}",
    "parallel.moe_token_dispatcher_type": "{} dispatcher",
    "parallel.zero_stage": "zero_stage {}",
    "parallel.recompute": "recomputation",
}
"""Knobs of a recipe as people call them, with their value."""
RESERVED = "blocks that the allocator holds in reserve, and gives back before it fails, come on top"


def risk(probability: float) -> str:
    """Return a chance of running out of memory as `3.2 %`, `0.15 %`, `below 0.01 %`."""
    if probability < LEAST:
        return f"below {100 * LEAST:g} %"
    if probability > 1.0 - LEAST:
        return f"above {100 * (1.0 - LEAST):g} %"
    return f"{100 * probability:.1f} %" if probability >= 0.00995 else f"{100 * probability:.2g} %"


def chance(estimate: Estimate) -> str:
    """Return `3.2 % chance of running out of memory`; empty where the estimate has none."""
    fails = estimate.out_of_memory_probability
    return "" if fails is None else f"{risk(fails)} chance of running out of memory"


def needs(estimate: Estimate) -> str:
    """Return the interval of memory with what it is of and what its top does not count; empty
    without one.
    """
    if estimate.intervals is None or estimate.memory is None:
        return ""
    low, high = estimate.intervals.memory_total_bytes
    has, usable = estimate.memory.device_bytes, estimate.memory.capacity_bytes
    some = "" if has is None or gib(has) == gib(usable) else f", of which {gib(usable)} are usable"
    device = "" if has is None else f"; the device has {gib(has)}{some}"
    between = (
        f"{low / GIB:.1f} to {gib(high)} allocated with {estimate.intervals.confidence:.0%} "
        f"confidence{device}"
    )
    reserved = estimate.intervals.memory_reserved_bytes
    return f"{between}; {RESERVED}" + (f", up to {gib(reserved[1])} in all" if reserved else "")


def why_wide(estimate: Estimate) -> str:
    """Return `11 % chance that it stalls, as runs measured on this cluster did: a step then takes
    5.2 times as long as otherwise`, or such a chance that the allocator of a nearly full device
    retries; empty where neither widens the interval.
    """
    if estimate.intervals is None:
        return ""
    if (
        "calibration" in estimate.provenance
    ):  # whose interval holds stalls unless they are rarer than what it leaves out
        slow, cause = (
            estimate.provenance.get("stalls"),
            "that it stalls, as runs measured on this cluster did",
        )
        least = 0.5 * (1.0 - estimate.intervals.confidence)
    else:
        slow, cause, least = (
            estimate.provenance.get("nearly_full"),
            "that the allocator of a nearly full device retries",
            0.0,
        )
    if not isinstance(slow, dict) or slow["probability"] <= least:
        return ""
    return (
        f"{risk(slow['probability'])} chance {cause}: a step then takes "
        f"{times(slow['slowdown'])} as long as otherwise"
    )


def narrower(estimate: Estimate) -> str:
    """Return `name the release (training.framework_version: 26.08), and the interval is 21 s to 32
    s, not 15 s to 44 s`; empty where nothing unsaid widens the interval of the step time.
    """
    if estimate.narrowest is None or estimate.intervals is None:
        return ""
    named = (
        (path, str(value).lower() if value is True else value)
        for path, value in estimate.narrowest.set.items()
    )
    values = ", ".join(f"{NAMES.get(path, path)} ({path}: {value})" for path, value in named)
    ends = (
        " to ".join(map(duration, each))
        for each in (estimate.narrowest.step_s, estimate.intervals.step_s)
    )
    return f"name {values}, and the interval is {', not '.join(ends)}"


def by_recipe(estimate: Estimate) -> str:
    """Return `14.7 s with training.recipe megatron-bridge-26.08, which has CUDA graphs, bf16
    gradients (1.02 times as long without)`; empty where there is no such recipe.
    """
    recipe = estimate.with_recipe
    if recipe is None:
        return ""
    words = []
    for path, value in recipe.changes.items():
        if path in KNOBS and value not in (False, None):
            gain = recipe.gains.get(path, 1.0)
            words.append(
                KNOBS[path].format(_value(value))
                + (f" ({gain:.2f} times as long without)" if gain > 1.005 else "")
            )
    fits = "" if recipe.feasible else " (does not fit)"
    which = f"which has {', '.join(words) or 'other settings'}"
    return f"{duration(recipe.step_s)} with training.recipe {recipe.recipe}{fits}, {which}"


def launched(estimate: Estimate) -> str:
    """Return `412.0 ms with CUDA graphs (training.cuda_graphs: true): launches bound this step`;
    empty where they do not, or the query says whether there are graphs.
    """
    graphs = estimate.provenance.get("with_cuda_graphs")
    if not isinstance(graphs, dict):
        return ""
    return (
        f"{duration(float(graphs['step_s']))} with CUDA graphs (training.cuda_graphs: true): "
        "launches bound this step"
    )


def taken(chosen: Mapping[str, object]) -> str:
    """Return `with CUDA graphs, loss fused, which change nothing that is trained`: free knobs among
    what a ranking chose.
    """
    words = [KNOBS[path].format(_value(chosen[path])) for path in FREE if path in chosen]
    return f"with {', '.join(words)}, which change nothing that is trained" if words else ""


def left_open(estimate: Estimate) -> tuple[str, ...]:
    """Return what the query leaves open and what naming it would give, a sentence each."""
    return tuple(filter(None, (narrower(estimate), launched(estimate), by_recipe(estimate))))


def _value(value: object) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return " and ".join(name.replace("_", " ") for name, each in value.items() if each)
    return str(value).replace("_", " ")
