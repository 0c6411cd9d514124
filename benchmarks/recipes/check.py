"""How many of the presets' values the rules give: with every preset seen, and for a model whose
presets are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from benchmarks.recipes.presets import GROUPS, Preset
from benchmarks.recipes.rules import releases
from benchmarks.recipes.write import recipes
from hp_tool import catalog
from hp_tool.domain.recipe import Recipe
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions import schema
from hp_tool.questions.training.recipes import recipe_settings

OF_EXPERTS = (
    "training.overlap",
    "parallel.moe_token_dispatcher_type",
    "parallel.expert_tensor_parallel_size",
)
"""Knobs that a dense model does not have."""
RECOMPUTE = "parallel.recompute"


@dataclass(frozen=True, slots=True)
class Score:
    """Values compared, by key."""

    right: Counter[str] = field(default_factory=Counter)
    of: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """Values that are the preset's, of all."""
        return self.right.total() / max(self.of.total(), 1)

    def by_key(self) -> dict[str, float]:
        """The share of each key."""
        return {key: self.right[key] / count for key, count in self.of.items()}

    def add(self, other: Score) -> None:
        """Count the other's values too."""
        self.right.update(other.right)
        self.of.update(other.of)


def score(presets: Iterable[Preset], text: str) -> Score:
    """Compare the presets with what recipes of the catalogue's YAML set, a release that the text
    lacks left out.
    """
    named = parsed(text)
    result = Score()
    for preset in presets:
        recipe = named.get(preset.release)
        if recipe is None:
            continue
        values = _columns(_settings(recipe, preset))
        wanted = _columns(
            {key: value for keys in preset.settings.values() for key, value in keys.items()}
        )
        for key, value in wanted.items():
            if key in OF_EXPERTS and preset.kind == "dense":
                continue
            result.of[key] += 1
            result.right[key] += values[key] == value
    return result


def left_out(presets: Sequence[Preset]) -> dict[str, Score]:
    """Return the score of each model's presets under rules made from the others'."""
    names = sorted({preset.model for preset in presets})
    return {
        name: score(
            (preset for preset in presets if preset.model == name),
            recipes(releases([preset for preset in presets if preset.model != name])),
        )
        for name in names
    }


def parsed(text: str) -> dict[str, Recipe]:
    """Return the recipes of the YAML by release, each with the rules of those it extends."""
    content = yaml.safe_load(text)
    result: dict[str, Recipe] = {}
    known: dict[str, dict[str, object]] = {}
    for name, entry in content["entries"].items():
        base = known.get(entry.pop("extends", ""), {})
        entry.pop("aliases", None)
        rules = [*base.get("rules", []), *entry["rules"]]  # type: ignore[misc]
        known[name] = {**base, **entry, "rules": rules, "name": name, "source": content["source"]}
        result[name.removeprefix("megatron-bridge-")] = schema.parse(Recipe, known[name])
    return result


def _columns(values: Mapping[str, Any]) -> dict[str, object]:
    """Values as the table has them: what is recomputed and how many layers apart."""
    recompute = values.get(RECOMPUTE) or {}
    keys = (key for group in GROUPS.values() for key in group if key != RECOMPUTE)
    fields = {f"{RECOMPUTE}.{name}": recompute.get(name) for name in ("modules", "num_layers")}
    return {key: values.get(key) for key in keys} | fields


def _settings(recipe: Recipe, preset: Preset) -> dict[str, object]:
    workload = TrainingWorkload(
        sequence_length=1,
        global_batch_size=preset.global_batch_size or 1,
        precision=preset.precision,
        task=preset.task,  # type: ignore[arg-type]
    )
    values = recipe_settings(
        recipe,
        model=catalog.model(preset.model),
        gpu=catalog.gpu(preset.gpu),
        num_gpus=preset.num_gpus,
        workload=workload,
    )
    return {
        f"{section}.{key}": value for section, keys in values.items() for key, value in keys.items()
    }
