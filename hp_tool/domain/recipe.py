"""Recipes: published settings other than the layout, and the training runs to which they apply."""

from dataclasses import dataclass, field
from typing import Any, Literal

from hp_tool.domain.fields import Strict
from hp_tool.domain.hardware import GpuSpec, Precision
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRule(Strict):
    """Settings for training runs that meet all conditions of the rule."""

    models: tuple[str, ...] = ()
    """Catalogue names; empty: any."""
    experts: bool | None = None
    """Whether the model has experts."""
    latent_attention: bool | None = None
    """Whether keys and values are compressed (multi-head latent attention)."""
    gpus: tuple[str, ...] = ()
    """Catalogue names or dies (b200 includes GB200); empty: any."""
    precisions: tuple[Precision, ...] = ()
    tasks: tuple[Literal["pretrain", "sft", "lora"], ...] = ()
    min_gpus: int | None = None
    max_gpus: int | None = None
    min_batch: int | None = None
    """Minimum number of sequences per step."""
    max_batch: int | None = None
    training: dict[str, Any] = field(default_factory=dict)
    """Values for keys of `training`; null removes the value set by an earlier rule."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """Values for keys of `parallel`."""

    @property
    def settings(self) -> str:
        """The settings as text: `training.gradient_precision: bf16, ...`."""
        sections = (("training", self.training), ("parallel", self.parallel))
        values = (
            f"{section}.{key}: {_list_words(value)}"
            for section, keys in sections
            for key, value in keys.items()
        )
        return ", ".join(values)

    @property
    def conditions(self) -> str:
        """The conditions as text: `model deepseek-v3, gpu h100`; empty if the rule always
        applies.
        """
        experts = {None: "", True: "models with experts", False: "dense models"}[self.experts]
        latent = {None: "", True: "with latent attention", False: "without latent attention"}[
            self.latent_attention
        ]
        lists = (
            ("model", self.models),
            ("gpu", self.gpus),
            ("precision", self.precisions),
            ("task", self.tasks),
        )
        sizes = (
            ("at least {} GPUs", self.min_gpus),
            ("at most {} GPUs", self.max_gpus),
            ("a batch of at least {}", self.min_batch),
            ("a batch of at most {}", self.max_batch),
        )
        named = (f"{name} {' or '.join(values)}" for name, values in lists if values)
        bounds = (text.format(size) for text, size in sizes if size is not None)
        return ", ".join(filter(None, (experts, latent, *named, *bounds)))

    def covers(self, other: "RecipeRule") -> bool:
        """Return whether this rule applies whenever the other rule applies."""
        return (
            self.experts in (None, other.experts)
            and self.latent_attention in (None, other.latent_attention)
            and self.min_gpus in (None, other.min_gpus)
            and self.max_gpus in (None, other.max_gpus)
            and self.min_batch in (None, other.min_batch)
            and self.max_batch in (None, other.max_batch)
            and _includes_all(self.models, other.models)
            and _includes_all(self.gpus, other.gpus)
            and _includes_all(self.precisions, other.precisions)
            and _includes_all(self.tasks, other.tasks)
        )

    def applies_to(
        self, *, model: ModelSpec, gpu: GpuSpec, num_gpus: int, workload: TrainingWorkload
    ) -> bool:
        """Return whether the rule applies to this training run."""
        batch = workload.global_batch_size
        return (
            (not self.models or model.name in self.models)
            and self.experts in (None, bool(model.num_experts))
            and self.latent_attention in (None, model.kv_lora_rank is not None)
            and (self.min_gpus or 0) <= num_gpus <= (self.max_gpus or num_gpus)
            and (self.min_batch or 0) <= batch <= (self.max_batch or batch)
            and (not self.gpus or gpu.name in self.gpus or gpu.silicon in self.gpus)
            and (not self.precisions or workload.precision in self.precisions)
            and (not self.tasks or workload.task in self.tasks)
        )


def _includes_all(names: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Return whether `names` includes all `others`. An empty `names` includes everything."""
    return not names or (bool(others) and set(others) <= set(names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Strict):
    """A recipe of the catalogue. Later rules override earlier ones, and the query overrides all
    rules.
    """

    name: str
    description: str
    source: str
    date: str = ""
    """Release month of the software that the recipe describes, such as 2024-07; empty: its rules
    name a release.
    """
    models: tuple[str, ...] = ()
    """Models for which the source publishes settings. Other models get the settings of a similar
    model, or those of the rules that name no model.
    """
    gpus: tuple[str, ...] = ()
    """GPUs for which the source publishes settings. Other GPUs get the settings of the most similar
    one.
    """
    rules: tuple[RecipeRule, ...]


def _list_words(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_list_words(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_list_words, value)) + "]"
    return (
        "left open"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
