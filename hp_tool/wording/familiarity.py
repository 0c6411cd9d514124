"""Sentences about how similar the nearest measured runs are to a query."""

from hp_tool.domain.familiarity import FAMILIAR_CLASS, Familiarity
from hp_tool.domain.parallel import ParallelConfig, Recompute, recompute_name
from hp_tool.domain.result import Estimate, Faster
from hp_tool.domain.units import format_count, format_duration
from hp_tool.wording.words import change_in_words

MISSING_RUNS_WORDS = {
    "trainer": "No measured run of this framework",
    "engine": "No measured run of this engine",
    "release": "No measured run of this release",
    "gpu": "No measured run on this GPU",
    "die": "No measured run on this GPU",
    "family": "No measured run of this model family",
    "model_kind": "No measured run of this kind of model",
    "precision": "No measured run in this precision",
    "task": "No measured run of this task",
    "scale": "No measured run on so many GPUs",
    "load": "No measured run under such a load",
}
"""Start of the sentence for each familiarity class."""


def familiarity_words(familiarity: Familiarity, *, serves: bool = False) -> str:
    """Return `12 measured runs of this model family on this GPU with this framework`. If no
    measured run is like the query, return what they all lack, and the nearest runs.
    """
    runs = format_count(familiarity.n, "measured run")
    if familiarity.class_ in (FAMILIAR_CLASS, "layout"):
        software = "engine" if serves else "framework"
        return f"{runs} of this model family on this GPU with this {software}"
    if not familiarity.nearest:
        return MISSING_RUNS_WORDS[familiarity.class_]
    first = familiarity.nearest[0]
    return (
        f"{MISSING_RUNS_WORDS[familiarity.class_]}; nearest: {runs} with "
        f"{', '.join(first.differs_in)} ({first.source})"
    )


def measured_words(estimate: Estimate) -> str:
    """Return the step time measured on this cluster, as `16.0 s per step (median of 3 runs)`; empty
    if the layout did not run.
    """
    measured = estimate.provenance.get("measured")
    if not isinstance(measured, dict):
        return ""
    runs = f" (median of {measured['runs']} runs)" if measured["runs"] > 1 else ""
    return f"{format_duration(measured['step_s'])} per step{runs}"


def faster_words(faster: Faster, *, than: ParallelConfig) -> str:
    """Return the layout that may be faster than rank 1, its gain, and its features without measured
    runs.
    """
    changes = change_in_words(than, faster.parallel, gpus=(1, 1))
    features = ", ".join(_feature_words(name, faster.parallel) for name in faster.unmeasured)
    return (
        f"Possibly {faster.gain_fraction:.1%} faster than rank 1, but not validated (no published "
        f"run uses it): {changes}{' with ' if changes else ''}{features}"
    )


def _feature_words(name: str, config: ParallelConfig) -> str:
    """Return the name of a query field and, if the layout sets it, its value."""
    value = getattr(config, name.removeprefix("parallel.").partition(".")[0], None)
    if isinstance(value, Recompute):
        value = recompute_name(value)
    return name if value is None else f"{name} {value}"
