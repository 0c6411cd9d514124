"""Read and write hybrid models, whose layers Megatron-LM describes by a pattern of letters.

Each mixer and each MLP counts as a layer. Source: ssm/mamba_hybrid_layer_allocation.py (Megatron
Core 0.16) and models/hybrid/hybrid_layer_allocation.py (0.17 to 0.19).
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hp_tool.domain.blocks import Block
from hp_tool.domain.declared import BLOCK_FIELDS, parse_names
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.pipeline_layout import chunk_layers
from hp_tool.domain.releases import STAGES_IN_PATTERNS, is_at_least
from hp_tool.domain.setups import TrainingSetup
from hp_tool.errors import UnsupportedError
from hp_tool.formats.reading import Setting
from hp_tool.formats.tools.megatron_lm import patterns, words
from hp_tool.formats.writing import Values

LETTERS = {
    ("mamba2", "none"): "M",
    ("attention", "none"): "*",
    ("none", "dense"): "-",
    ("none", "experts"): "E",
}
"""Megatron's letters, by mixer and kind of MLP."""
FIELDS = BLOCK_FIELDS | parse_names("""
    mixer feed_forward ssm_state_size mamba_head_dim mamba_n_groups mamba_num_heads
    moe_latent_size
""")
"""Model fields that these flags express in addition to `words.EXPRESSED_FIELDS`."""
RENAMED_IN = {"container": (26, 6), "core": (0, 18)}
"""First releases that call such a stack of layers hybrid."""
PATTERN_FLAGS = ("hybrid-layer-pattern", "hybrid-override-pattern")
"""Names of the pattern flag: since STAGES_IN_PATTERNS, and before."""
STAGE, PREDICTION = "|", "/"


def is_hybrid(model: ModelSpec) -> bool:
    """Return True if Megatron-LM needs a layer pattern for the model."""
    return not model.is_uniform and not patterns.can_express(model)


def program(setup: TrainingSetup) -> str:
    """Return the file name of the Megatron-LM script that trains the model."""
    if not is_hybrid(setup.model):
        return "pretrain_gpt.py"
    return "pretrain_hybrid.py" if _has_release(setup, RENAMED_IN) else "pretrain_mamba.py"


def hybrid_flags(setup: TrainingSetup) -> Values:
    """Return the flags of a hybrid model, which replace the flags for identical pipeline stages.

    Raises:
        UnsupportedError: A layer has no letter, or the release lacks a feature.
    """
    m, c = setup.model, setup.parallel
    letters, chunks = layer_pattern(m), c.virtual_pipeline_parallel_size
    unified = _has_release(setup, STAGES_IN_PATTERNS)
    if not unified and (m.num_nextn_predict_layers or chunks > 1):
        what = "an interleaved pipeline" if chunks > 1 else "multi-token prediction"
        raise UnsupportedError(
            f"{words.TOOL} has no {what} for layers of different kinds before 0.17; set "
            "training.framework_version to 0.17 or later",
            field="training.framework_version",
        )
    sizes = chunk_layers(
        num_layers=m.num_hidden_layers, stages=c.pipeline_parallel_size, chunks=chunks
    )
    if setup.strategy.pipeline_layout is not None:
        sizes = [chunk.layers for chunk in setup.strategy.pipeline_layout.chunks]
    module = "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
    if _has_release(setup, RENAMED_IN):
        module = "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
    values: dict[str, bool | int | float | str | list[str] | None] = {
        "spec": module.split(),
        words.WITH_EMBEDDING: None,
        words.WITH_LOSS: None,
        words.FIRST_STAGE: None,
        words.LAST_STAGE: None,
        words.LAYOUT_FLAG: None,
        "num-virtual-stages-per-pipeline-rank": None,
        "moe-latent-size": m.moe_latent_size,
    }
    if "M" in letters:
        values |= {
            "mamba-state-dim": m.ssm_state_size,
            "mamba-head-dim": m.mamba_head_dim,
            "mamba-num-groups": m.mamba_n_groups,
            "mamba-num-heads": m.mamba_num_heads,
        }
    if unified:
        ends = list(itertools.accumulate(sizes))
        stages = [letters[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        text = (
            STAGE.join(stages)
            + m.num_nextn_predict_layers * f"{PREDICTION}{default_prediction_letters(letters)}"
        )
        return values | {"hybrid-layer-pattern": text}
    if len(set(sizes[1:-1])) > 1:
        raise UnsupportedError(
            f"{words.TOOL} has no flag for stages of {sizes} layers before 0.17; set "
            "training.framework_version to 0.17 or later",
            field="training.framework_version",
        )
    if len(set(sizes)) > 1:
        values |= {words.FIRST_STAGE: sizes[0], words.LAST_STAGE: sizes[-1]}
    return values | {"is-hybrid-model": True, "hybrid-override-pattern": letters}


def _has_release(setup: TrainingSetup, since: Mapping[str, tuple[int, ...]]) -> bool:
    return is_at_least(setup.workload.framework_version or "", since=since)


def layer_pattern(model: ModelSpec) -> str:
    """Return the layer pattern: one letter per layer.

    Raises:
        UnsupportedError: A layer has no letter.
    """
    blocks = model.blocks or (Block(mixer=model.mixer, feed_forward=model.feed_forward),)
    letters = "".join(_block_letter(model, block) * block.count for block in blocks)
    return letters * (model.num_hidden_layers // len(letters))


def default_prediction_letters(letters: str) -> str:
    """Return the letters of a multi-token prediction layer, as in `ModelSpec.mtp_kinds`."""
    feeding = [letter for letter in letters if letter in "-E"]
    return "*" * ("*" in letters) + "".join(feeding[-1:])


def _block_letter(model: ModelSpec, block: Block) -> str:
    feeding = block.feed_forward or ("experts" if model.num_experts else "dense")
    letter = LETTERS.get((block.mixer, feeding))
    if letter is None or replace(block, count=1, mixer="attention", feed_forward=None) != Block():
        raise UnsupportedError(
            f"{words.TOOL} has no pattern letter for a layer of {model.name} "
            f"({replace(block, count=1)}); it has letters for Mamba 2, attention, MLP "
            "and experts",
            field="model.blocks",
        )
    return letter


def blocks_of_pattern(letters: str) -> list[dict[str, Any]] | None:
    """Return `model.blocks` for a pattern without stages; None if a letter is unknown."""
    meanings = {
        letter: {"mixer": mixer, "feed_forward": feeding}
        for (mixer, feeding), letter in LETTERS.items()
    }
    if not letters or not set(letters) <= meanings.keys():
        return None
    return [
        {"count": len(list(alike)), **meanings[letter]}
        for letter, alike in itertools.groupby(letters)
    ]


def pattern_of_fractions(layers: int, *, attention: float, mlp: float) -> str:
    """Return the layer pattern for given fractions of attention and MLP layers.

    Attention layers are spaced evenly over all layers, and MLPs evenly over the remaining ones.
    """
    letters = _spread_letter(
        "M" * layers, "*", round(layers * attention), sections=round(layers * attention) + 1
    )
    count = round(layers * mlp)
    return _spread_letter(letters, "-", count, sections=count)


def _spread_letter(letters: str, letter: str, count: int, *, sections: int) -> str:
    """Return the letters with `count` of the M replaced by `letter`, evenly spaced."""
    if not count:
        return letters
    left = letters.count("M") - count
    run = left / sections
    written, ahead = "", run
    for symbol in letters:
        if symbol != "M":
            written += symbol
        elif ahead < 0.5:
            written, ahead = written + letter, ahead + run
        else:
            written, ahead = written + symbol, ahead - 1
    return written


def with_pattern_counts(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the settings with the layer counts that the pattern implies, also for MTP layers."""
    written = settings.get("hybrid-layer-pattern")
    if written is None or len(written.values) != 1:
        return dict(settings)
    main, *predicted = written.values[0].split(PREDICTION)
    counts = {"num-layers": len(main.replace(STAGE, ""))} | (
        {"mtp-num-layers": len(predicted)} if predicted else {}
    )
    return {
        **settings,
        **{
            name: replace(written, name=name, values=(str(count),))
            for name, count in counts.items()
        },
    }
