"""Familiarity: how similar the measured runs are to a query, and how much this widens the interval.

A query and a group of measured runs differ in some dimensions. The nearest runs are those whose
most severe difference is mildest. That difference is the query's familiarity class. Each difference
adds a variance to ln(measured / predicted), estimated from held-out runs with this difference
(`Doubts`).
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
"""Class of a query that does not differ from the measured runs."""
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
"""Dimensions in which a training run may differ from all measured runs, most severe first. Severity
is the error that the difference added on held-out runs. `gpu` means another card with a measured
die, `family` another model of a measured kind.
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
"""Dimensions in which a serving query may differ from all measured runs, most severe first."""
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
"""Maximum number of sources that an answer names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Strict):
    """Attributes of a query, or those that a group of measured runs has in common."""

    software: str
    """Training framework or inference engine."""
    release: str = ""
    """Release; empty if the query names none."""
    gpu: str
    die: str = ""
    family: str = ""
    model_kind: str = "dense"
    precision: str = "bf16"
    task: str = "pretrain"
    """Training: pretrain, or lora."""
    load: str = ""
    """Serving: arrival process of requests."""
    num_gpus: int = 1
    """Number of GPUs; for a group of measured runs, the maximum."""
    lender: str = ""
    """Framework that lends its constants to one without its own; its runs have priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Setting):
    """A group of measured runs."""

    n: int = 1
    source: str = ""


@dataclass(frozen=True, eq=False)
class Index:
    """All groups of measured training runs, or of serving runs. Instances compare by identity."""

    runs: tuple[Measured, ...] = ()


NO_RUNS = Index()


def group_settings(settings: Iterable[Setting]) -> Index:
    """Return an index of single runs in which runs with equal settings form one group."""
    names = [each.name for each in fields(Setting)]
    return Index(
        tuple(
            Measured(n=n, **{name: getattr(one, name) for name in names})
            for one, n in Counter(settings).items()
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The nearest measured runs from one source."""

    source: str
    differs_in: tuple[str, ...]
    """Differences in words, with the value of the runs: `GPU h100-sxm-80gb`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Familiarity:
    """Similarity of the nearest measured runs to a query."""

    class_: str
    """`familiar`, the most severe dimension in which the nearest runs differ, or `layout` if they
    lack only the features in `unmeasured`. Called `class` in JSON.
    """
    n: int
    """Number of nearest runs."""
    nearest: tuple[Nearest, ...] = ()
    unmeasured: tuple[str, ...] = ()
    """Query fields whose value occurs in no measured run."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Make pydantic serialize `class_` as `class`, a reserved word in Python."""
        schema = handler(source)
        for each in schema["schema"]["fields"]:
            if each["name"] == "class_":
                each["serialization_alias"] = each["validation_alias"] = "class"
        schema.setdefault("config", {})["serialize_by_alias"] = True
        return schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearness:
    """The nearest measured runs, and the variance that their differences from the query add to
    ln(measured / predicted).
    """

    differs: tuple[str, ...]
    """Dimensions in which the runs differ from the query, most severe first."""
    variance: float
    runs: tuple[Measured, ...] = field(default=(), repr=False)

    def answer(self, unmeasured: tuple[str, ...] = ()) -> Familiarity:
        """Return the familiarity for an estimate with these unmeasured features."""
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
    """Return the value of the measured runs in a dimension, in words: `release 26.04`."""
    if dimension == "scale":
        return f"number of GPUs: at most {run.num_gpus:,}"
    value = getattr(run, SETTING_FIELDS.get(dimension, dimension))
    return f"{DIMENSION_LABELS[dimension]} {value or 'not named'}"


SETTING_FIELDS = {"trainer": "software", "engine": "software", "die": "gpu", "scale": "num_gpus"}
"""Field of `Setting` for each dimension whose name differs from the field's."""


def find_nearest(
    setting: Setting, index: Index, extras: Mapping[str, float], *, serves: bool = False
) -> Nearness:
    """Return the runs in the index that are nearest to a setting.

    Args:
        extras: Standard deviation of ln(measured / predicted) that a difference adds, by dimension.
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
    runs_by_difference: dict[tuple[bool, ...], list[Measured]] = {}
    for run in index.runs:
        is_other_software = bool(setting.lender) and run.software != setting.lender
        names = differing_dimensions(setting, run, serves=serves)
        runs_by_difference.setdefault(
            (is_other_software, *(name in names for name in order)), []
        ).append(run)
    if not runs_by_difference:
        return order[:1], ()
    nearest = min(runs_by_difference)
    return tuple(itertools.compress(order, nearest[1:])), tuple(runs_by_difference[nearest])


def differing_dimensions(setting: Setting, run: Measured, *, serves: bool) -> tuple[str, ...]:
    """Return the dimensions in which measured runs differ from a query."""
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
    """Return the kind of a model in words: `dense`, `mixture of experts, mamba2`."""
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
    """Return the family of a model from its name: `llama-3` for `meta-llama/Llama-3.1-8B`.

    The family is the lower-case part of the name before the size, without organization and minor
    version.
    """
    words: list[str] = []
    for word in re.split(r"[-_ ]", name.rpartition("/")[2].casefold()):
        if _SIZE.match(word):
            break
        words.append(re.sub(r"(\d)\.\d+$", r"\1", word))
    return "-".join(words)


def arithmetic_precision(precision: str | None) -> str:
    """Return the precision, with fp16 mapped to bf16, because both use the same arithmetic
    units.
    """
    return "bf16" if precision in (None, "fp16", "bf16") else str(precision)
