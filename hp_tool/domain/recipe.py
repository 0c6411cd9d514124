"""Named sets of knobs: what a published recipe sets beside the layout, and for which trainings."""

from dataclasses import dataclass, field
from typing import Any, Literal

from hp_tool.domain.fields import Strict
from hp_tool.domain.hardware import GpuSpec, Precision
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRule(Strict):
    """Knobs, and the trainings that they are set for: those that meet every condition given."""

    models: tuple[str, ...] = ()
    """Catalogue names; none: any."""
    experts: bool | None = None
    """Whether the model has experts."""
    gpus: tuple[str, ...] = ()
    """Catalogue names or dies (b200 is also GB200's); none: any."""
    precisions: tuple[Precision, ...] = ()
    tasks: tuple[Literal["pretrain", "sft", "lora"], ...] = ()
    training: dict[str, Any] = field(default_factory=dict)
    """Values of keys of `training`; null takes an earlier rule's back."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """Values of keys of `parallel`."""

    @property
    def settings(self) -> str:
        """`training.gradient_precision: bf16, ...`."""
        sections = (("training", self.training), ("parallel", self.parallel))
        values = (f"{section}.{key}: {_words(value)}" for section, keys in sections for key, value in keys.items())
        return ", ".join(values)

    @property
    def conditions(self) -> str:
        """`model deepseek-v3, gpu h100`; empty: every training."""
        experts = {None: "", True: "models with experts", False: "dense models"}[self.experts]
        lists = (("model", self.models), ("gpu", self.gpus), ("precision", self.precisions), ("task", self.tasks))
        return ", ".join(filter(None, (experts, *(f"{name} {' or '.join(values)}" for name, values in lists if values))))

    def covers(self, other: "RecipeRule") -> bool:
        """Whether this rule holds for every training that the other holds for."""
        return self.experts in (None, other.experts) and all(
            not mine or (theirs and set(theirs) <= set(mine))
            for mine, theirs in (
                (self.models, other.models),
                (self.gpus, other.gpus),
                (self.precisions, other.precisions),
                (self.tasks, other.tasks),
            )
        )

    def holds(self, *, model: ModelSpec, gpu: GpuSpec, workload: TrainingWorkload) -> bool:
        """Whether the rule is about this training."""
        return (
            (not self.models or model.name in self.models)
            and self.experts in (None, bool(model.num_experts))
            and (not self.gpus or gpu.name in self.gpus or gpu.silicon in self.gpus)
            and (not self.precisions or workload.precision in self.precisions)
            and (not self.tasks or workload.task in self.tasks)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Strict):
    """A recipe of the catalogue. Of two rules that set one key the later wins; what a query writes wins over both."""

    name: str
    description: str
    source: str
    rules: tuple[RecipeRule, ...]


def _words(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_words(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_words, value)) + "]"
    return "left open" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
