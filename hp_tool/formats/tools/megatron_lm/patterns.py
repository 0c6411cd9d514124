"""Read and write models whose attention, gated delta net or MoE layers are listed per layer.

Source: models/gpt/experimental_attention_variant_module_specs.py and ssm/gated_delta_net of
Megatron Core 0.17 to 0.19.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hp_tool.domain.blocks import Block
from hp_tool.domain.declared import BLOCK_FIELDS
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.releases import STAGES_IN_PATTERNS, is_at_least
from hp_tool.domain.setups import TrainingSetup
from hp_tool.errors import UnsupportedError
from hp_tool.formats.tools.megatron_lm import words
from hp_tool.formats.writing import Values

DELTA_RULE = "gated_delta_net"
"""Value of --experimental-attention-variant that the cost model supports."""
SIZES = {
    "linear_num_key_heads": ("linear-num-key-heads", 16),
    "linear_num_value_heads": ("linear-num-value-heads", 32),
    "linear_key_head_dim": ("linear-key-head-dim", 128),
    "linear_value_head_dim": ("linear-value-head-dim", 128),
    "linear_conv_kernel_dim": ("linear-conv-kernel-dim", 4),
}
"""Flags for the sizes of a gated delta net, by field, with their defaults."""
FIELDS = BLOCK_FIELDS.union({"mixer", "feed_forward", "attention_output_gate"}, SIZES)
"""Model fields that these flags express in addition to `words.EXPRESSED_FIELDS`."""


def can_express(model: ModelSpec) -> bool:
    """Return True if the model can be described by lists with one number per layer."""
    return all(
        kind.mixer in ("attention", "gated_delta") and kind.feed_forward != "none"
        for _, kind in model.kinds
    )


def pattern_flags(setup: TrainingSetup) -> Values:
    """Return the flags that list the kind of each layer; none if all layers are identical.

    Raises:
        UnsupportedError: Layers differ in other ways, or the release lacks a feature.
    """
    m = setup.model
    for block in m.blocks or ():
        if replace(block, count=1, mixer="attention", feed_forward=None) != Block():
            raise UnsupportedError(
                f"{words.TOOL} has no flags for a layer of {m.name}: {replace(block, count=1)}",
                field="model.blocks",
            )
    kinds = [kind for _, kind in m.kinds]
    values: dict[str, bool | int | float | str | list[str] | None] = {}
    if m.blocks is not None and 0 < m.moe_layers < m.num_hidden_layers:
        values["moe-layer-freq"] = _list_text(
            [int(bool(kinds[place].num_experts)) for place in m.pattern]
        )
    if m.attention_output_gate == "head":
        raise UnsupportedError(
            f"{words.TOOL} does not support per-head output gates",
            field="model.attention_output_gate",
        )
    values["attention-output-gate"] = m.attention_output_gate is not None
    delta = next((kind for kind in kinds if kind.mixer == "gated_delta"), None)
    if delta is not None:
        sizes = {flag: getattr(delta, name) for name, (flag, _) in SIZES.items()}
        values |= sizes | {
            "experimental-attention-variant": DELTA_RULE,
            "linear-attention-freq": _list_text(
                [int(kinds[place].mixer == "gated_delta") for place in m.pattern]
            ),
            "linear-num-value-heads": delta.linear_num_value_heads or delta.linear_num_key_heads,
            "linear-value-head-dim": delta.linear_value_head_dim or delta.linear_key_head_dim,
        }
    later = delta is not None or m.attention_output_gate is not None
    if later and not is_at_least(setup.workload.framework_version or "", since=STAGES_IN_PATTERNS):
        what = "gated delta rules" if delta is not None else "gates of attention's output"
        raise UnsupportedError(
            f"{words.TOOL} has no flags for {what} before 0.17; set "
            "training.framework_version to 0.17 or later",
            field="training.framework_version",
        )
    return values


def _list_text(numbers: Sequence[int]) -> str:
    """Return the shortest expression for a list, such as `([1]*3+[0]*1)*16`."""
    period = next(
        size
        for size in range(1, len(numbers) + 1)
        if list(numbers) == list(numbers[:size]) * (len(numbers) // size)
    )
    runs = "+".join(
        f"[{number}]*{len(list(alike))}" for number, alike in itertools.groupby(numbers[:period])
    )
    return f"({runs})*{len(numbers) // period}"


def blocks_of_lists(
    *, delta: Sequence[int] | None, experts: Sequence[int] | None
) -> list[dict[str, Any]] | None:
    """Return `model.blocks` for lists that mark gated delta net layers and MoE layers.

    Without the list `delta`, no layer is a gated delta net; without `experts`, no layer is MoE.
    Return None if other fields describe the layers.
    """
    scattered = (
        experts is not None and 0 in experts[experts.index(1) if 1 in experts else len(experts) :]
    )
    if delta is None and not scattered:
        return None
    size = len(delta or experts or ())
    mixers = ["gated_delta" if each else "attention" for each in delta or [0] * size]
    feeding = (
        [None] * size
        if experts is None
        else ["experts" if expert else "dense" for expert in experts]
    )
    runs = itertools.groupby(zip(mixers, feeding, strict=True))
    return [
        {"count": len(list(alike)), "mixer": mixer} | ({"feed_forward": feeds} if feeds else {})
        for (mixer, feeds), alike in runs
    ]
