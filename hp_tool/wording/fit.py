"""Chances and intervals in words: how a configuration fits, and what would narrow the interval of
its step time.
"""

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass

from hp_tool.domain.knobs import FREE
from hp_tool.domain.result import Estimate
from hp_tool.domain.units import GIB, duration, duration_range, gib, times

LEAST = 1e-4
KNOBS = {
    "training.cuda_graphs": "CUDA graphs",
    "training.gradient_precision": "{} gradients",
    "training.parameter_precision": "{} parameters",
    "training.cross_entropy": "{} loss",
    "training.overlap": "{} overlap",
    "training.fp8_recipe": "{} scaling",
    "training.optimizer_precision": "{} moments",
    "training.offload": "offloaded {}",
    "training.frozen_precision": "frozen weights in {}",
    "parallel.moe_token_dispatcher_type": "{} dispatcher",
    "parallel.zero_stage": "zero_stage {}",
    "parallel.recompute": "recomputation",
}
"""Knobs of a recipe as people call them, with their value."""
RESERVED = "allocator cache not counted"


def risk(probability: float) -> str:
    """Return a chance of running out of memory as `3.2%`, `0.15%`, `below 0.01%`."""
    if probability < LEAST:
        return f"below {100 * LEAST:g}%"
    if probability > 1.0 - LEAST:
        return f"above {100 * (1.0 - LEAST):g}%"
    return f"{100 * probability:.1f}%" if probability >= 0.00995 else f"{100 * probability:.2g}%"


def chance(estimate: Estimate) -> str:
    """Return `3.2 % chance of running out of memory`; empty where the estimate has none."""
    fails = estimate.out_of_memory_probability
    return "" if fails is None else f"{risk(fails)} chance of running out of memory"


def needs(estimate: Estimate) -> str:
    """Return the interval of memory, what it is of, and what it does not count; empty without an
    interval.
    """
    if estimate.intervals is None or estimate.memory is None:
        return ""
    low, high = estimate.intervals.memory_total_bytes
    has, usable = estimate.memory.device_bytes, estimate.memory.capacity_bytes
    device = f" of {gib(usable)}"
    if has is not None and gib(has) != gib(usable):
        device += f" usable ({gib(has)} in all)"
    between = (
        f"{low / GIB:.1f}-{gib(high)} allocated ({estimate.intervals.confidence:.0%} interval)"
        f"{device}"
    )
    reserved = estimate.intervals.memory_reserved_bytes
    return f"{between}; {RESERVED}" + (f", up to {gib(reserved[1])} with it" if reserved else "")


def why_wide(estimate: Estimate) -> str:
    """Return `11% chance of a stall, as runs on this cluster did: a step then takes 5.2 times as
    long`, or the chance that the allocator of a nearly full device retries; empty if neither widens
    the interval.
    """
    if estimate.intervals is None:
        return ""
    if (
        "calibration" in estimate.provenance
    ):  # whose interval holds stalls unless they are rarer than what it leaves out
        slow, cause = (
            estimate.provenance.get("stalls"),
            "of a stall, as runs on this cluster did",
        )
        least = 0.5 * (1.0 - estimate.intervals.confidence)
    else:
        slow, cause, least = (
            estimate.provenance.get("nearly_full"),
            "that the allocator retries, because memory is nearly full",
            0.0,
        )
    if not isinstance(slow, dict) or slow["probability"] <= least:
        return ""
    return (
        f"{risk(slow['probability'])} chance {cause}: a step then takes "
        f"{times(slow['slowdown'])} as long"
    )


def narrower(estimate: Estimate) -> str:
    """Return `Narrower range (12.2-17.5 s): set training.framework_version to 26.08.`; empty if no
    key of the query would narrow the interval of the step time.
    """
    if estimate.narrowest is None or estimate.intervals is None:
        return ""
    values = " and ".join(
        f"{path} to {str(value).lower() if value is True else value}"
        for path, value in estimate.narrowest.set.items()
    )
    return f"Narrower range ({duration_range(*estimate.narrowest.step_s)}): set {values}."


def by_recipe(estimate: Estimate) -> str:
    """Return `With recipe megatron-bridge-26.08: 14.7 s (CUDA graphs, bf16 gradients).`; empty if
    there is no such recipe.
    """
    recipe, assumed = estimate.with_recipe, estimate.provenance.get("usual")
    if recipe is None or (isinstance(assumed, dict) and "training.recipe" in assumed["set"]):
        return ""  # the answer assumes it already
    knobs = [
        _knob(path, value)
        for path, value in recipe.changes.items()
        if path in KNOBS and value not in (False, None)
    ]
    fits = "" if recipe.feasible else ", which does not fit"
    settings = f" ({', '.join(knobs)})" if knobs else ""
    return f"With recipe {recipe.recipe}: {duration(recipe.step_s)}{settings}{fits}."


def launched(estimate: Estimate) -> str:
    """Return `With CUDA graphs (training.cuda_graphs: true): 412.0 ms, as launches bound this
    step.`; empty if they do not, or if the query says whether there are graphs.
    """
    graphs = estimate.provenance.get("with_cuda_graphs")
    if not isinstance(graphs, dict):
        return ""
    return (
        f"With CUDA graphs (training.cuda_graphs: true): {duration(float(graphs['step_s']))}, "
        "as launches bound this step."
    )


def usual(estimate: Estimate) -> str:
    """Return `Assumes recipe megatron-bridge-26.08, as such runs use it; 13.6 s per step without
    it.`; empty if the query's open settings are the framework's defaults.
    """
    assumed = estimate.provenance.get("usual")
    if not isinstance(assumed, dict):
        return ""
    settings = assumed["set"]
    names = (
        ["training.recipe"] if "training.recipe" in settings else list(settings)
    )  # what follows from a recipe is its own
    words = ", ".join(
        f"{path.removeprefix('training.')} {'true' if settings[path] is True else settings[path]}"
        for path in names
    )
    without = duration(float(assumed["step_s_without"]))
    return f"Assumes {words}, as such runs use it; {without} per step without it."


def taken(chosen: Mapping[str, object]) -> str:
    """Return `Assumes CUDA graphs and fused loss (same numerics).`: free knobs that a ranking
    chose; empty without any.
    """
    words = [_knob(path, chosen[path]) for path in FREE if path in chosen]
    return f"Assumes {' and '.join(words)} (same numerics)." if words else ""


def left_open(estimate: Estimate) -> tuple[str, ...]:
    """Return what the query leaves open and what naming it would give, a sentence each."""
    return tuple(
        filter(None, (usual(estimate), narrower(estimate), launched(estimate), by_recipe(estimate)))
    )


def _knob(path: str, value: object) -> str:
    return KNOBS[path].format(_value(value)).replace("in place loss", "in-place loss")


def _value(value: object) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return " and ".join(name.replace("_", " ") for name, each in value.items() if each)
    return str(value).replace("_", " ")
