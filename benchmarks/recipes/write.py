"""Write rules as the catalogue's YAML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from benchmarks.recipes.rules import Release, Rule

WIDTH = 128
HEAD = """\
# What NVIDIA's performance recipes set beside the layout, by release of the NeMo container. Rules of a release follow those of
# the one it extends: first what most models of a kind have, then where single models differ. Generated from the presets of each
# release by `python -m benchmarks.recipes --write`; change the generator, not this file.
source: >-
  NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs and src/megatron/bridge/perf_recipes of each release;
  docs/performance-summary.md and its archive
entries:
"""  # noqa: E501
FIRST: tuple[Rule, ...] = (
    Rule({}, {"training.gradient_precision": "bf16", "training.cross_entropy": "in_place"}),
    Rule({"precisions": ["fp8"]}, {"training.fp8_recipe": "tensorwise"}),
    Rule(
        {"precisions": ["fp8", "mxfp8"], "tasks": ["pretrain", "sft"]},
        {"training.parameter_precision": "fp8"},
    ),
    Rule({"precisions": ["fp8", "mxfp8"], "tasks": ["lora"]}, {"training.frozen_precision": "fp8"}),
    Rule({"experts": True, "gpus": ["b200"]}, {"training.expert_capacity_factor": 1.0}),
    Rule({"models": ["deepseek-v3"]}, {"training.optimizer_precision": "bf16"}),
)
"""Settings in the sources of releases that have no column in the table of presets."""
LATER: dict[str, tuple[Rule, ...]] = {
    "25.11": (
        Rule({"experts": True, "gpus": ["b200"]}, {"training.expert_capacity_factor": None}),
    ),
}
"""The same for a later release: 25.11 drops no tokens."""
NOTES = {
    "25.09": "MoE models on B200 and GB200 pad to the mean load and drop tokens",
    "25.11": "no token is dropped",
}
ALIASES = ("megatron-bridge",)
"""Other names of the newest release."""


def render_recipes(releases: Sequence[Release]) -> str:
    """Return the file of all releases, oldest first."""
    entries = []
    for place, release in enumerate(releases):
        fixed = FIRST if place == 0 else LATER.get(release.name, ())
        fixed = (Rule({}, {"training.framework_version": release.name}), *fixed)
        before = releases[place - 1] if place else None
        newest = release is releases[-1]
        entries.append(
            "\n".join(
                _render_release(release, [*fixed, *release.rules], before=before, newest=newest)
            )
        )
    return HEAD + "\n".join(entries) + "\n"


def _render_release(
    release: Release, rules: Iterable[Rule], *, before: Release | None, newest: bool
) -> list[str]:
    note = NOTES.get(release.name)
    lines = [f"  megatron-bridge-{release.name}:"]
    if before is not None:
        lines.append(f"    extends: megatron-bridge-{before.name}")
    if newest:
        lines.append(f"    aliases: {_flow(list(ALIASES))}")
    lines.append(
        f"    description: Megatron Bridge of NeMo {release.name}{f'; {note}' if note else ''}"
    )
    for name in ("models", "gpus"):
        if before is None or getattr(before, name) != getattr(release, name):
            lines += _list(name, getattr(release, name))
    return [*lines, "    rules:", *(line for rule in rules for line in _render_rule(rule))]


def _list(name: str, values: Sequence[str]) -> list[str]:
    one = f"    {name}: {_flow(list(values))}"
    return (
        [one] if len(one) <= WIDTH else [f"    {name}:", *(f"      - {value}" for value in values)]
    )


def _render_rule(rule: Rule) -> list[str]:
    """Return a rule as one line if it is short, else conditions and values on separate lines."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in rule.setting.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    one = f"      - {_flow({**rule.conditions, **sections})}"
    if len(one) <= WIDTH:
        return [one]
    values = f"         {_flow(sections)[1:]}"
    more = [values] if len(values) <= WIDTH else [f"         {part}" for part in _parts(sections)]
    return [f"      - {_flow(rule.conditions)[:-1]},", *more]


def _parts(sections: dict[str, dict[str, Any]]) -> list[str]:
    """Return one line per section, the last of which ends the rule."""
    parts = [f"{section}: {_flow(values)}," for section, values in sections.items()]
    return [*parts[:-1], f"{parts[-1][:-1]}}}"]


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return str(text).removesuffix("\n").removesuffix("\n...")
