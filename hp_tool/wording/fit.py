"""Sentences about an estimate: whether the configuration fits in memory, and which settings would
narrow its interval or speed it up.
"""

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass

from hp_tool.domain.knobs import FREE_PATHS
from hp_tool.domain.latencies import LATENCIES
from hp_tool.domain.result import Estimate, Fix
from hp_tool.domain.serving import InferenceEstimate, ServingFix
from hp_tool.domain.units import (
    GIB,
    format_duration,
    format_duration_range,
    format_factor,
    format_gib,
)

MIN_SHOWN_PROBABILITY = 1e-4
MIN_REPORTED_SLOWDOWN = 1.5
"""Minimum factor by which a fix increases a latency for a sentence to report it."""
KNOB_LABELS = {
    "training.cuda_graphs": "CUDA graphs",
    "training.gradient_precision": "{} gradients",
    "training.parameter_precision": "{} parameters",
    "training.cross_entropy": "{} loss",
    "training.overlap": "{} overlap",
    "training.fp8_recipe": "{} scaling",
    "training.optimizer_precision": "{} optimizer states",
    "training.offload": "offloaded {}",
    "training.frozen_precision": "frozen weights in {}",
    "parallel.moe_token_dispatcher_type": "{} dispatcher",
    "parallel.zero_stage": "zero_stage {}",
    "parallel.recompute": "recomputation",
}
"""Labels of a recipe's settings, where {} stands for the value."""
CACHE_NOTE = "allocator cache not counted"


def risk_words(probability: float) -> str:
    """Return a probability of running out of memory as `3.2%`, `0.15%` or `below 0.01%`."""
    if probability < MIN_SHOWN_PROBABILITY:
        return f"below {100 * MIN_SHOWN_PROBABILITY:g}%"
    if probability > 1.0 - MIN_SHOWN_PROBABILITY:
        return f"above {100 * (1.0 - MIN_SHOWN_PROBABILITY):g}%"
    return f"{100 * probability:.1f}%" if probability >= 0.00995 else f"{100 * probability:.2g}%"


def out_of_memory_words(estimate: Estimate) -> str:
    """Return `3.2% chance of running out of memory`; empty if the probability is unknown."""
    fails = estimate.out_of_memory_probability
    return "" if fails is None else f"{risk_words(fails)} chance of running out of memory"


def memory_range_words(estimate: Estimate) -> str:
    """Return `60.1-64.5 GiB allocated (90% interval) of 75.1 GiB usable; allocator cache not
    counted`; empty if the estimate has no interval.
    """
    if estimate.intervals is None or estimate.memory is None:
        return ""
    low, high = estimate.intervals.memory_total_bytes
    device_bytes, usable_bytes = estimate.memory.device_bytes, estimate.memory.capacity_bytes
    device = f" of {format_gib(usable_bytes)}"
    if device_bytes is not None and format_gib(device_bytes) != format_gib(usable_bytes):
        device += f" usable ({format_gib(device_bytes)} total)"
    interval_text = (
        f"{low / GIB:.1f}-{format_gib(high)} allocated ({estimate.intervals.confidence:.0%} "
        f"interval)"
        f"{device}"
    )
    reserved = estimate.intervals.memory_reserved_bytes
    return f"{interval_text}; {CACHE_NOTE}" + (
        f", up to {format_gib(reserved[1])} with it" if reserved else ""
    )


def stall_words(estimate: Estimate) -> str:
    """Return `11% chance of a stall, as observed on this cluster: a step then takes 5.2 times as
    long`, or the probability that the allocator of a nearly full device retries.

    Empty if neither widens the interval.
    """
    if estimate.intervals is None:
        return ""
    if (
        "calibration" in estimate.provenance
    ):  # Stalls rarer than the tail outside the interval do not widen it.
        slow, cause = (
            estimate.provenance.get("stalls"),
            "of a stall, as observed on this cluster",
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
        f"{risk_words(slow['probability'])} chance {cause}: a step then takes "
        f"{format_factor(slow['slowdown'])} as long"
    )


def narrower_range_words(estimate: Estimate) -> str:
    """Return `Narrower range (12.2-17.5 s): set training.framework_version to 26.08.`; empty if no
    query key would narrow the step-time interval.
    """
    if estimate.narrowest is None or estimate.intervals is None:
        return ""
    values = " and ".join(
        f"{path} to {str(value).lower() if value is True else value}"
        for path, value in estimate.narrowest.set.items()
    )
    return f"Narrower range ({format_duration_range(*estimate.narrowest.step_s)}): set {values}."


def recipe_words(estimate: Estimate) -> str:
    """Return `With recipe megatron-bridge-26.08: 14.7 s (CUDA graphs, bf16 gradients).`; empty if
    no recipe applies.
    """
    recipe, assumed = estimate.with_recipe, estimate.provenance.get("usual")
    if recipe is None or (isinstance(assumed, dict) and "training.recipe" in assumed["set"]):
        return ""  # The answer already assumes the recipe.
    knobs = [
        _knob_words(path, value)
        for path, value in recipe.changes.items()
        if path in KNOB_LABELS and value not in (False, None)
    ]
    fits = "" if recipe.feasible else ", which does not fit"
    settings = f" ({', '.join(knobs)})" if knobs else ""
    return f"With recipe {recipe.recipe}: {format_duration(recipe.step_s)}{settings}{fits}."


def cuda_graphs_words(estimate: Estimate) -> str:
    """Return `With CUDA graphs (training.cuda_graphs: true): 412.0 ms, because kernel launches
    limit this step.`

    Empty if kernel launches do not limit the step, or if the query sets cuda_graphs.
    """
    graphs = estimate.provenance.get("with_cuda_graphs")
    if not isinstance(graphs, dict):
        return ""
    return (
        f"With CUDA graphs (training.cuda_graphs: true): "
        f"{format_duration(float(graphs['step_s']))}, "
        "because kernel launches limit this step."
    )


def usual_settings_words(estimate: Estimate) -> str:
    """Return `Assumes recipe megatron-bridge-26.08, the usual setting of such runs; 13.6 s per step
    without it.`

    Empty if the answer assumes the framework's defaults.
    """
    assumed = estimate.provenance.get("usual")
    if not isinstance(assumed, dict):
        return ""
    settings = assumed["set"]
    names = (
        ["training.recipe"] if "training.recipe" in settings else list(settings)
    )  # The other settings follow from the recipe.
    words = ", ".join(
        f"{path.removeprefix('training.')} {'true' if settings[path] is True else settings[path]}"
        for path in names
    )
    without = format_duration(float(assumed["step_s_without"]))
    return f"Assumes {words}, the usual setting of such runs; {without} per step without it."


def unrun_settings_words(unrun: object) -> str:
    """Return the reason why the runs of a search do not use the recipe that `recommend` assumes for
    a layout; empty if they use it.

    `unrun` is `provenance.unrun` of the layout's estimate.
    """
    if not isinstance(unrun, dict):
        return ""
    with_s = format_duration(float(unrun["step_s_with"]))
    settings = " and ".join(unrun["lacking"])
    runner = "trainer's command" if unrun["by_command"] else "profiler"
    if not settings:
        reason = f"the {runner} supports none of the best layouts with this recipe"
    elif unrun["by_command"]:
        reason = f"the {runner} does not set its {settings}"
    else:
        reason = (
            f"the {runner} does not support its {settings}; a trainer's command with exported "
            "flags can run the recipe"
        )
    return (
        f"`recommend` assumes recipe {unrun['set']['training.recipe']} for this layout ({with_s} "
        f"per step). These runs use the framework's defaults, because {reason}."
    )


def chosen_settings_words(chosen: Mapping[str, object]) -> str:
    """Return `Assumes CUDA graphs and fused loss (same numerics).` for the free settings that a
    ranking chose; empty if it chose none.
    """
    words = [
        _knob_words(path, chosen[path])
        for path in KNOB_LABELS
        if path in FREE_PATHS and path in chosen
    ]
    return f"Assumes {' and '.join(words)} (same numerics)." if words else ""


def open_settings_sentences(estimate: Estimate) -> tuple[str, ...]:
    """Return a sentence for each setting that the query leaves open and that affects the answer."""
    return tuple(
        filter(
            None,
            (
                usual_settings_words(estimate),
                narrower_range_words(estimate),
                cuda_graphs_words(estimate),
                recipe_words(estimate),
            ),
        )
    )


def _knob_words(path: str, value: object) -> str:
    return KNOB_LABELS[path].format(_value_words(value)).replace("in place loss", "in-place loss")


def _value_words(value: object) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return " and ".join(name.replace("_", " ") for name, each in value.items() if each)
    return str(value).replace("_", " ")


def traded_words(fix: Fix | ServingFix, before: Estimate | InferenceEstimate) -> str:
    """Return `but 279.1 ms -> 24.36 s to the first token` if a serving fix worsens another latency;
    otherwise empty.
    """
    if isinstance(fix, Fix) or isinstance(before, Estimate):
        return ""
    latencies = [
        (getattr(before, name), getattr(fix, name), each.per) for name, each in LATENCIES.items()
    ]
    longer = [
        f"{format_duration(was)} -> {format_duration(now)} {words}"
        for was, now, words in latencies
        if was and now > MIN_REPORTED_SLOWDOWN * was
    ]
    return f"but {' and '.join(longer)}" if longer else ""
