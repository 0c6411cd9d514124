"""Convert presets to a short list of rules: settings of most models of a kind, then the exceptions.

Every preset that meets a rule's conditions has its value. The order of a release's exceptions
therefore does not matter, and rules with different keys and the same conditions are merged. The
rules of each release follow those of the previous release.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.recipes.presets import GROUPS, Preset, Setting

KINDS: dict[str, dict[str, bool]] = {
    "dense": {"experts": False},
    "experts": {"experts": True, "latent_attention": False},
    "latent": {"experts": True, "latent_attention": True},
}
"""Kinds of models, and the conditions of a rule about each."""
WIDER = {"experts": True}
"""Conditions of a rule about both kinds of MoE models."""
OF_A_SIZE = ("offload", "sharding")
"""Groups that depend on a model's memory, so that no rule applies them to another model."""
OF_A_KIND = ("recompute",)
"""Groups in which models with latent attention differ from other MoE models."""
Conditions = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """Settings for the trainings that meet all conditions."""

    conditions: Conditions
    setting: Setting

    @property
    def key(self) -> str:
        """The conditions as text."""
        return json.dumps(self.conditions, sort_keys=True)

    def holds(self, preset: Preset) -> bool:
        """Return True if the preset meets the conditions."""
        conditions, kind = self.conditions, preset.kind
        return (
            preset.model in conditions.get("models", (preset.model,))
            and conditions.get("experts", kind != "dense") == (kind != "dense")
            and conditions.get("latent_attention", kind == "latent") == (kind == "latent")
            and preset.gpu in conditions.get("gpus", (preset.gpu,))
            and preset.precision in conditions.get("precisions", (preset.precision,))
            and preset.task in conditions.get("tasks", (preset.task,))
            and _within(preset.num_gpus, conditions, "gpus")
            and _within(preset.global_batch_size or 0, conditions, "batch")
        )


@dataclass(frozen=True, slots=True)
class Release:
    """The rules that a release adds to those before it, and the presets that it lists."""

    name: str
    models: tuple[str, ...]
    gpus: tuple[str, ...]
    rules: list[Rule] = field(default_factory=list)


def release_rules(presets: Sequence[Preset]) -> list[Release]:
    """Return the rules of each release, oldest first."""
    learned: list[Release] = []
    by_release: dict[str, list[Preset]] = defaultdict(list)
    for preset in one_of_each_cell(presets):
        by_release[preset.release].append(preset)
    inherited: list[Rule] = []
    listed: list[Preset] = []
    for name in sorted(by_release):
        listed = [*by_release[name], *_unlisted_presets(listed, by_release[name])]
        usual = _common_rules(listed, inherited)
        exceptions = _model_rules(listed, [*inherited, *usual])
        models = tuple(sorted({preset.model for preset in listed}))
        gpus = tuple(sorted({preset.gpu for preset in listed}))
        learned.append(
            Release(name, models, gpus, _without_idle_nulls([*usual, *exceptions], inherited))
        )
        inherited += learned[-1].rules
    return learned


def _unlisted_presets(before: Iterable[Preset], listed: Iterable[Preset]) -> list[Preset]:
    """Return the earlier, still valid presets of models and tasks that a release does not list."""
    known = {(preset.model, preset.task) for preset in listed}
    return [preset for preset in before if (preset.model, preset.task) not in known]


def _without_idle_nulls(rules: Iterable[Rule], inherited: Iterable[Rule]) -> list[Rule]:
    """Return the rules without nulls for keys that no rule has set before."""
    known = {key for rule in inherited for key, value in rule.setting.items() if value is not None}
    kept: list[Rule] = []
    for rule in rules:
        values = {
            key: value for key, value in rule.setting.items() if value is not None or key in known
        }
        known |= {key for key, value in values.items() if value is not None}
        if values:
            kept.append(Rule(rule.conditions, values))
    return kept


def one_of_each_cell(presets: Sequence[Preset]) -> list[Preset]:
    """Return one preset per training. Presets that differ only in the scaling of fp8 are reduced to
    the tensorwise one, which a query for fp8 selects.
    """
    ordered = sorted(presets, key=lambda preset: preset.scaling in (None, "tensorwise"))
    return list(
        {
            tuple(part for part in preset.cell if part != preset.scaling): preset
            for preset in ordered
        }.values()
    )


def rule_settings(rules: Iterable[Rule], preset: Preset) -> Setting:
    """Return the settings that the rules give to the preset's training."""
    values: Setting = {}
    for rule in rules:
        if rule.holds(preset):
            values |= rule.setting
    return values


def _common_rules(listed: Sequence[Preset], inherited: Sequence[Rule]) -> list[Rule]:
    """Return the settings of most models of a kind on a GPU in a precision, as rules."""
    general = [rule for rule in inherited if "models" not in rule.conditions]
    listed = [preset for preset in listed if not preset.is_hybrid]
    rules: list[Rule] = []
    for group in (name for name in GROUPS if name not in OF_A_SIZE):
        examples, wanted = [], []
        for kind in KINDS:
            members = [
                preset for preset in listed if preset.kind == kind and preset.task == "pretrain"
            ]
            voters = (
                members
                if group in OF_A_KIND or kind == "dense"
                else [p for p in listed if p.kind != "dense"]
            )
            for gpu, precision in dict.fromkeys(
                (preset.gpu, preset.precision) for preset in members
            ):
                example = next(p for p in members if (p.gpu, p.precision) == (gpu, precision))
                votes = _votes(
                    [
                        p
                        for p in voters
                        if (p.gpu, p.precision, p.task) == (gpu, precision, "pretrain")
                    ],
                    group,
                )
                before = _text(_with_nulls(rule_settings(general, example), group))
                most = max(votes.values())
                tied = [value for value, count in votes.items() if count > most - 1e-9]
                examples.append(example)
                wanted.append(before if before in tied else min(tied, key=len))
        rules += _cheapest_rules(examples, wanted, [*general], group, of_models=False)
    return _merge_rules(rules)


def _votes(listed: Sequence[Preset], group: str) -> dict[str, float]:
    """Return how many models have each setting of a group. A model's presets share its vote."""
    votes: dict[str, float] = defaultdict(float)
    presets_of = Counter(preset.model for preset in listed)
    for preset in listed:
        votes[_text(preset.settings[group])] += 1.0 / presets_of[preset.model]
    return votes


def _model_rules(listed: Sequence[Preset], rules: Sequence[Rule]) -> list[Rule]:
    """Return rules about single models, with those that several models share merged."""
    names_by_rule: dict[str, list[str]] = defaultdict(list)
    content: dict[str, Rule] = {}
    for name in sorted({preset.model for preset in listed}):
        mine = [preset for preset in listed if preset.model == name]
        own = [
            rule
            for group in GROUPS
            for rule in _cheapest_rules(
                mine, [_text(p.settings[group]) for p in mine], rules, group, of_models=True
            )
        ]
        for rule in _merge_rules(own):
            text = json.dumps([rule.conditions, rule.setting])
            names_by_rule[text].append(name)
            content[text] = rule
    return [
        Rule({"models": names, **content[text].conditions}, content[text].setting)
        for text, names in names_by_rule.items()
    ]


def _cheapest_rules(
    presets: Sequence[Preset],
    wanted: Sequence[str],
    rules: Sequence[Rule],
    group: str,
    *,
    of_models: bool,
) -> list[Rule]:
    """Return the fewest and simplest rules, chosen greedily, after which each preset has the wanted
    setting of the group.
    """
    places_of: dict[str, int] = defaultdict(int)
    wrong = 0
    for place, (preset, value) in enumerate(zip(presets, wanted, strict=True)):
        places_of[value] |= 1 << place
        if _text(_with_nulls(rule_settings(rules, preset), group)) != value:
            wrong |= 1 << place
    chosen: list[Rule] = []
    # Sizes are conditions only if no other attribute distinguishes the presets.
    for sizes in (False, True):
        boxes = _condition_masks(presets, of_models=of_models, sizes=sizes) if wrong else []
        while wrong and (pure := _best_conditions(boxes, wrong, places_of)) is not None:
            conditions, mask, value = pure
            wrong &= ~mask
            chosen.append(Rule(conditions, json.loads(value)))
    if wrong:
        raise ValueError(
            f"presets of one training differ in {group}: "
            f"{[presets[i].cell for i in _places(wrong)]}"
        )
    return chosen


def _best_conditions(
    boxes: Iterable[tuple[Conditions, int]], wrong: int, places_of: Mapping[str, int]
) -> tuple[Conditions, int, str] | None:
    """Return the conditions that correct most presets to one value; of several, those with the
    fewest conditions.
    """
    best: tuple[tuple[int, ...], tuple[Conditions, int, str]] | None = None
    for conditions, mask in boxes:
        hits = (mask & wrong).bit_count()
        if not hits or (best is not None and hits < best[0][0]):
            continue
        value = next((text for text, places in places_of.items() if not mask & ~places), None)
        if value is None:
            continue
        score = (
            hits,
            -len(conditions),
            -sum(len(v) if isinstance(v, list) else 1 for v in conditions.values()),
        )
        if best is None or score > best[0]:
            best = (score, (conditions, mask, value))
    return None if best is None else best[1]


def _condition_masks(
    presets: Sequence[Preset], *, of_models: bool, sizes: bool
) -> list[tuple[Conditions, int]]:
    """Return conditions with a bit mask of the presets that meet them."""
    everyone: tuple[Conditions, int] = ({}, _mask(presets, lambda _: True))
    axes: list[list[tuple[Conditions, int]]] = [
        _subset_conditions(presets, "gpus", "gpu"),
        _subset_conditions(presets, "precisions", "precision"),
    ]
    if of_models:
        axes.append(_subset_conditions(presets, "tasks", "task"))
        sides = (
            _size_conditions(presets, "gpus", "num_gpus")
            + _size_conditions(presets, "batch", "global_batch_size")
            if sizes
            else []
        )
        axes.append([everyone, *sides])
    else:
        kinds = [
            (conditions, _mask(presets, lambda p, c=conditions: Rule(c, {}).holds(p)))  # type: ignore[misc]
            for conditions in (*KINDS.values(), WIDER)
        ]
        axes.append([everyone, *kinds])
    boxes = []
    for parts in itertools.product(*axes):
        mask = -1
        for _, part in parts:
            mask &= part
        if mask and not _forgets_gpus(presets, mask, parts):
            boxes.append(
                ({key: value for conditions, _ in parts for key, value in conditions.items()}, mask)
            )
    return boxes


def _forgets_gpus(
    presets: Sequence[Preset], mask: int, parts: Iterable[tuple[Conditions, int]]
) -> bool:
    """Return True if conditions on a hybrid's presets name no GPUs although the presets are of some
    GPUs only.

    A hybrid's presets use one kind of fp8 on each die. With conditions on precision alone, settings
    that fit H100 would apply to other dies and their graphs.
    """
    if not any(preset.is_hybrid for preset in presets) or any(
        "gpus" in conditions for conditions, _ in parts
    ):
        return False
    return {presets[place].gpu for place in _places(mask)} != {preset.gpu for preset in presets}


def _subset_conditions(
    presets: Sequence[Preset], key: str, name: str
) -> list[tuple[Conditions, int]]:
    """Return every proper subset of an attribute's values as a condition."""
    values = sorted({getattr(preset, name) for preset in presets})
    axes: list[tuple[Conditions, int]] = [({}, _mask(presets, lambda _: True))]
    for count in range(1, len(values)):
        for subset in itertools.combinations(values, count):
            axes.append(
                ({key: list(subset)}, _mask(presets, lambda p, s=subset: getattr(p, name) in s))
            )  # type: ignore[misc]
    return axes


def _size_conditions(
    presets: Sequence[Preset], key: str, name: str
) -> list[tuple[Conditions, int]]:
    """Return conditions that distinguish sizes. A size that is not listed belongs to the nearest
    size, by ratio.
    """
    sizes = sorted({value for preset in presets if (value := getattr(preset, name))})
    sides: list[tuple[Conditions, int]] = []
    for low, high in itertools.pairwise(sizes):
        bound = round((low * high) ** 0.5)
        sides.append(
            ({f"min_{key}": bound}, _mask(presets, lambda p, b=bound: (getattr(p, name) or 0) >= b))
        )  # type: ignore[misc]
        sides.append(
            (
                {f"max_{key}": bound - 1},
                _mask(presets, lambda p, b=bound: (getattr(p, name) or 0) < b),
            )
        )  # type: ignore[misc]
    return sides


def _merge_rules(rules: Iterable[Rule]) -> list[Rule]:
    """Return the rules with those of the same conditions merged, the general ones first."""
    joined: dict[str, Rule] = {}
    for rule in rules:
        known = joined.get(rule.key)
        joined[rule.key] = (
            rule if known is None else Rule(rule.conditions, known.setting | rule.setting)
        )
    return sorted(joined.values(), key=lambda rule: len(rule.conditions))


def _mask(presets: Sequence[Preset], meets: Any) -> int:
    return sum(1 << place for place, preset in enumerate(presets) if meets(preset))


def _places(mask: int) -> list[int]:
    return [place for place in range(mask.bit_length()) if mask >> place & 1]


def _with_nulls(values: Mapping[str, Any], group: str) -> Setting:
    return {key: values.get(key) for key in GROUPS[group]}


def _text(values: Setting) -> str:
    return json.dumps(values)


def _within(value: int, conditions: Conditions, name: str) -> bool:
    return conditions.get(f"min_{name}", 0) <= value <= conditions.get(f"max_{name}", value)
