"""Count the values of presets that the rules reproduce, with and without the model's presets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from benchmarks.recipes.presets import GROUPS, Preset
from benchmarks.recipes.rules import release_rules
from benchmarks.recipes.write import render_recipes
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
"""Keys that a dense model does not have."""
RECOMPUTE = "parallel.recompute"


@dataclass(frozen=True, slots=True)
class Score:
    """Numbers of compared and of equal values, by key."""

    equal: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """Share of values that equal the preset's."""
        return self.equal.total() / max(self.compared.total(), 1)

    def by_key(self) -> dict[str, float]:
        """The share of each key."""
        return {key: self.equal[key] / count for key, count in self.compared.items()}

    def add(self, other: Score) -> None:
        """Add another score's counts."""
        self.equal.update(other.equal)
        self.compared.update(other.compared)


def score(presets: Iterable[Preset], text: str) -> Score:
    """Compare presets with the settings in the catalogue's YAML. Presets of releases that the YAML
    lacks are skipped.
    """
    named = parse_recipes(text)
    result = Score()
    for preset in presets:
        recipe = named.get(preset.release)
        if recipe is None:
            continue
        values = _table_values(_settings(recipe, preset))
        wanted = _table_values(
            {key: value for keys in preset.settings.values() for key, value in keys.items()}
        )
        for key, value in wanted.items():
            if key in OF_EXPERTS and preset.kind == "dense":
                continue
            result.compared[key] += 1
            result.equal[key] += values[key] == value
    return result


def score_unseen(presets: Sequence[Preset]) -> dict[str, Score]:
    """Return the score of each model's presets under rules generated without them."""
    names = sorted({preset.model for preset in presets})
    return {
        name: score(
            (preset for preset in presets if preset.model == name),
            render_recipes(release_rules([preset for preset in presets if preset.model != name])),
        )
        for name in names
    }


def parse_recipes(text: str) -> dict[str, Recipe]:
    """Return the recipes of the YAML by release, with the rules that each inherits."""
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


def _table_values(values: Mapping[str, Any]) -> dict[str, object]:
    """Return the values in the form of the table, in which recomputation and its number of layers
    are separate.
    """
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
