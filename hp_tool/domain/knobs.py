"""Facts about the keys of `training`: whether they change the numerics, what may set them besides
the query, and which values profile runs support.

A key without a row in KNOBS is set only by queries, and profile runs use its default. A key that
accepts a list of values has the type `fields.Choice`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ENGINES = ("megatron-core", "torch-fsdp")
"""Frameworks for which the built-in profiler has an engine."""
Runs = Mapping[str, Collection[Any] | None]
"""Values besides the default that each engine of the profiler supports; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """Facts about one key of `training` that are not part of a formula."""

    trains: bool = False
    """Whether the key changes the numerics. A ranking varies such a key only if the query lists
    values for it.
    """
    set_by: Literal["recipe", "recipe or ranking"] | None = None
    """What may set the key if the query omits it. A ranking sets only keys that do not change the
    numerics.
    """
    runs: Runs = field(default_factory=dict)
    plain: Collection[Any] | None = None
    """Supported values under plain frameworks (`FrameworkFacts.is_plain`), from their measured
    runs; None: any.
    """


def _all(*values: Any) -> Runs:
    return dict.fromkeys(ENGINES, values)


def _megatron(*values: Any, others: tuple[Any, ...] = ()) -> Runs:
    return {"megatron-core": values, "torch-fsdp": others}


_ANY: Runs = dict.fromkeys(ENGINES)
_ANY_OF_MEGATRON: Runs = {"megatron-core": None}
_STATE = _megatron("fp32", "bf16", others=("fp32",))

KNOBS: Mapping[str, Knob] = {
    "sequence_length": Knob(runs=_ANY),
    "global_batch_size": Knob(trains=True, runs=_ANY),
    "precision": Knob(
        trains=True,
        # torch-fsdp stores fp32 weights and casts them when it gathers them.
        runs=_megatron("fp16", "fp32", "fp8", others=("fp32",)),
        plain=("bf16",),
    ),
    "framework_version": Knob(set_by="recipe"),
    "fp8_recipe": Knob(trains=True, set_by="recipe", runs=_ANY_OF_MEGATRON),
    "parameter_precision": Knob(trains=True, set_by="recipe", runs=_all("fp32"), plain=("bf16",)),
    "gradient_precision": Knob(trains=True, set_by="recipe", runs=_all("fp32")),
    "optimizer_precision": Knob(trains=True, set_by="recipe", runs=_STATE, plain=("fp32",)),
    "exp_avg_sq_precision": Knob(trains=True, set_by="recipe", runs=_STATE, plain=()),
    "master_precision": Knob(trains=True, set_by="recipe", runs=_all("fp32"), plain=("fp32",)),
    "optimizer": Knob(runs=_all("sgd"), plain=("adam",)),
    "attention": Knob(runs=_ANY_OF_MEGATRON, plain=("flash",)),
    "cross_entropy": Knob(
        set_by="recipe or ranking",
        runs=_megatron("unfused", "fused", "in_place", others=("unfused",)),
        plain=("unfused",),
    ),
    "dropout": Knob(runs=_ANY_OF_MEGATRON, plain=(0.0,)),
    "cuda_graphs": Knob(set_by="recipe or ranking", runs=_megatron(False, True, others=(False,))),
    "cuda_graph_modules": Knob(set_by="recipe"),
    "overlap": Knob(set_by="recipe or ranking"),
    "frozen_precision": Knob(trains=True, set_by="recipe"),
    "lora": Knob(set_by="recipe"),
    "activation_func_fp8_input_store": Knob(set_by="recipe"),
    "gated_product": Knob(set_by="recipe", runs=_all("kept")),
    "expert_capacity_factor": Knob(trains=True, set_by="recipe", runs=_ANY_OF_MEGATRON),
    "expert_precision": Knob(trains=True, set_by="recipe"),
    "dispatch_precision": Knob(trains=True, set_by="recipe", runs=_all("bf16")),
    "task": Knob(plain=("pretrain", "sft")),
    "offload": Knob(set_by="recipe", runs=_all("none"), plain=("none",)),
    "offload_fraction": Knob(set_by="recipe", runs=_all(1.0)),
    "attention_kernel": Knob(set_by="recipe", runs=_all("auto")),
    "gradient_reduction": Knob(set_by="recipe", runs=_all("micro_batch")),
}
"""All knobs by key of `training`, in the order in which answers list assumed values."""

OF_RECIPES = tuple(name for name, knob in KNOBS.items() if knob.set_by)
"""Keys of `training` that a recipe may set besides the framework."""
FREE_PATHS = frozenset(
    f"training.{n}" for n, knob in KNOBS.items() if knob.set_by == "recipe or ranking"
)
"""Query paths that a ranking may set to improve its result."""


def run_by(engine: str) -> dict[str, Collection[Any] | None]:
    """Return the values that an engine supports, by key of `training`; see `declared.Declared`."""
    return {name: knob.runs[engine] for name, knob in KNOBS.items() if engine in knob.runs}
