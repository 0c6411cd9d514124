"""How near the measured runs are to a question, and how much wider its interval is for the rest.

A question and a group of measured runs differ in dimensions. The nearest runs are those without
the most severe difference that others have; the class of a question is the most severe difference
from these. Each difference adds to the variance of ln(measured / predicted) what left-out runs of
its class needed (`Doubts`).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hp_tool.domain.fields import Strict
from hp_tool.domain.model import ModelSpec

FAMILIAR_CLASS = "familiar"
"""The class of a question that differs from measured runs in nothing."""
TRAINING_DIMENSIONS = (
    "trainer",
    "die",
    "model_kind",
    "task",
    "scale",
    "precision",
    "family",
    "release",
    "gpu",
)
"""What a training may differ in from all measured runs, most severe first: by what each added to
the errors on left-out runs. gpu is another card of a measured die, family another model of a
measured kind.
"""
SERVING_DIMENSIONS = (
    "engine",
    "model_kind",
    "die",
    "release",
    "load",
    "precision",
    "family",
    "gpu",
)
"""The same of serving."""
DIMENSION_LABELS: Mapping[str, str] = {
    "trainer": "trainer",
    "engine": "engine",
    "release": "release",
    "gpu": "GPU",
    "die": "GPU",
    "family": "model family",
    "model_kind": "kind of model",
    "precision": "precision",
    "task": "task",
    "scale": "number of GPUs",
    "load": "load",
}
MAX_NEAREST = 3
"""Sources that an answer names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Strict):
    """Attributes of a question, or common attributes of a group of measured runs."""

    software: str
    """Training framework or inference engine."""
    release: str = ""
    """Release; empty if not named."""
    gpu: str
    die: str = ""
    family: str = ""
    model_kind: str = "dense"
    precision: str = "bf16"
    task: str = "pretrain"
    """Of trainings: pretrain, or lora for adapters."""
    load: str = ""
    """Of serving: arrival of requests."""
    num_gpus: int = 1
    """Of measured runs: the most of any."""
    lender: str = ""
    """Framework whose constants are used for one without its own; its runs have priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Setting):
    """A group of measured runs."""

    n: int = 1
    source: str = ""


@dataclass(frozen=True, eq=False)
class Index:
    """All groups of measured runs of trainings or of serving; equal only to itself."""

    runs: tuple[Measured, ...] = ()


NO_RUNS = Index()


def group_settings(settings: Iterable[Setting]) -> Index:
    """Return the settings of single runs as groups."""
    names = [each.name for each in fields(Setting)]
    return Index(
        tuple(
            Measured(n=n, **{name: getattr(one, name) for name in names})
            for one, n in Counter(settings).items()
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """Measured runs of one source."""

    source: str
    differs_in: tuple[str, ...]
    """In words, with the runs' own value: `GPU h100-sxm-80gb`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Familiarity:
    """How near the nearest measured runs are."""

    class_: str
    """`familiar`, or the most severe dimension in which the nearest runs differ, or `layout` for
    features of `unmeasured` alone. JSON names it `class`.
    """
    n: int
    """The nearest runs."""
    nearest: tuple[Nearest, ...] = ()
    unmeasured: tuple[str, ...] = ()
    """Query fields with a value that no measured run has."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Let pydantic write `class_` as `class`, which no Python field can be called."""
        schema = handler(source)
        for each in schema["schema"]["fields"]:
            if each["name"] == "class_":
                each["serialization_alias"] = each["validation_alias"] = "class"
        schema.setdefault("config", {})["serialize_by_alias"] = True
        return schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearness:
    """The nearest runs and what their differences add to the variance of ln(measured /
    predicted).
    """

    differs: tuple[str, ...]
    """Dimensions, the most severe first."""
    variance: float
    runs: tuple[Measured, ...] = field(default=(), repr=False)

    def answer(self, unmeasured: tuple[str, ...] = ()) -> Familiarity:
        """Return the familiarity shown by an estimate."""
        counts: dict[str, int] = {}
        first: dict[str, Measured] = {}
        for run in self.runs:
            counts[run.source] = counts.get(run.source, 0) + run.n
            first.setdefault(run.source, run)
        largest = sorted(counts, key=lambda source: -counts[source])[:MAX_NEAREST]
        beyond = "layout" if unmeasured else FAMILIAR_CLASS
        return Familiarity(
            class_=self.differs[0] if self.differs else beyond,
            n=sum(counts.values()),
            nearest=tuple(
                Nearest(
                    source=source,
                    differs_in=tuple(
                        describe_difference(name, first[source]) for name in self.differs
                    ),
                )
                for source in largest
            ),
            unmeasured=unmeasured,
        )


def describe_difference(dimension: str, run: Measured) -> str:
    """Return what the runs have in place of the question's: `release 26.04`."""
    if dimension == "scale":
        return f"number of GPUs: at most {run.num_gpus:,}"
    value = getattr(run, SETTING_FIELDS.get(dimension, dimension))
    return f"{DIMENSION_LABELS[dimension]} {value or 'not named'}"


SETTING_FIELDS = {"trainer": "software", "engine": "software", "die": "gpu", "scale": "num_gpus"}
"""Fields of a setting that hold a dimension, where the names differ."""


def find_nearest(
    setting: Setting, index: Index, extras: Mapping[str, float], *, serves: bool = False
) -> Nearness:
    """Return the nearest of the index's runs.

    extras: By dimension the standard deviation of ln(measured / predicted) that a difference adds.
    """
    differs, runs = _nearest(setting, index, serves)
    return Nearness(
        differs=differs,
        variance=math.fsum(extras.get(name, 0.0) ** 2 for name in differs),
        runs=runs,
    )


@functools.lru_cache(maxsize=4096)
def _nearest(
    setting: Setting, index: Index, serves: bool
) -> tuple[tuple[str, ...], tuple[Measured, ...]]:
    """Return the dimensions in which the nearest runs differ, and these runs."""
    order = SERVING_DIMENSIONS if serves else TRAINING_DIMENSIONS
    found: dict[tuple[bool, ...], list[Measured]] = {}
    for run in index.runs:
        others = bool(setting.lender) and run.software != setting.lender
        names = differing_dimensions(setting, run, serves=serves)
        found.setdefault((others, *(name in names for name in order)), []).append(run)
    if not found:
        return order[:1], ()
    nearest = min(found)
    return tuple(itertools.compress(order, nearest[1:])), tuple(found[nearest])


def differing_dimensions(setting: Setting, run: Measured, *, serves: bool) -> tuple[str, ...]:
    """Return the dimensions in which measured runs differ from a question."""
    names = []
    if setting.software != run.software:
        names.append("engine" if serves else "trainer")
    elif setting.release and run.release and not _same_release(setting.release, run.release):
        names.append("release")
    if setting.gpu != run.gpu:
        names.append("gpu" if setting.die and setting.die == run.die else "die")
    if setting.model_kind != run.model_kind:
        names.append("model_kind")
    elif setting.family != run.family:
        names.append("family")
    kinds = ("precision", "load") if serves else ("precision", "task")
    names += [name for name in kinds if getattr(setting, name) != getattr(run, name)]
    if not serves and setting.num_gpus > run.num_gpus:
        names.append("scale")
    return tuple(names)


def _same_release(one: str, other: str) -> bool:
    return re.findall(r"\d+", one)[:3] == re.findall(r"\d+", other)[:3]


def kind_of_model(model: ModelSpec) -> str:
    """Return a model's kind in words: `dense`, `mixture of experts, mamba2`."""
    parts = ["mixture of experts" if model.num_experts else "dense"]
    if model.architecture != "decoder":
        parts.append(model.architecture)
    kinds = [kind for _, kind in model.kinds]
    recurrent = {kind.mixer for kind in kinds} - {"attention", "none"}
    parts += sorted(recurrent)
    if any(kind.index_topk is not None for kind in kinds):
        parts.append("sparse attention")
    elif any(kind.sliding_window is not None for kind in kinds):
        parts.append("sliding window")
    return ", ".join(parts)


_SIZE = re.compile(r"^(a?\d+(\.\d+)?[kmbt]|\d+(\.\d+)?[kmbt]?x\d+\w*|small|medium|base|large|x+l)$")


def family_of(name: str) -> str:
    """Return the family of a model by its name: `llama-3` of `meta-llama/Llama-3.1-8B`.

    Words up to the size, without the organization, the suffix of a version (3.1) and its case.
    """
    words: list[str] = []
    for word in re.split(r"[-_ ]", name.rpartition("/")[2].casefold()):
        if _SIZE.match(word):
            break
        words.append(re.sub(r"(\d)\.\d+$", r"\1", word))
    return "-".join(words)


def arithmetic_precision(precision: str | None) -> str:
    """Return a precision with bf16 and fp16 merged, because both run on the same units."""
    return "bf16" if precision in (None, "fp16", "bf16") else str(precision)
