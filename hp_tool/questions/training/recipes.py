"""Determine the values of settings that a query omits, from its recipe or from defaults."""

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from hp_tool.catalog import library
from hp_tool.cost.optimizer import gradient_precision, optimizer_precision, stored_precision
from hp_tool.cost.shared import Shared
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.knobs import OF_RECIPES
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery, Strategy, recompute_name
from hp_tool.domain.query import Query
from hp_tool.domain.recipe import Recipe, RecipeRule
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload
from hp_tool.errors import InputError
from hp_tool.questions import schema
from hp_tool.questions.training.nearest import describe_stand_in, like_gpu, like_model

PARALLEL_KNOBS = (
    "moe_token_dispatcher_type",
    "expert_tensor_parallel_size",
    "recompute",
    "zero_stage",
    "context_parallel_communication",
)
LISTED_FIELDS = ("models", "gpus")
"""Fields that a recipe inherits from the recipe that it extends."""
OVERLAPS = tuple(f.name for f in fields(OverlapSpec))
S = TypeVar("S", TrainingWorkload, ParallelQuery, OverlapSpec)


def get_recipe(name: str, *, field: str = "training.recipe") -> Recipe:
    """Return the recipe with this name from the built-in or the user's catalogue.

    Raises:
        NotFoundError: No recipe has this name.
        InputError: The recipe is malformed.
    """
    return _recipe_of_entry(library.entry("recipes", name, field=field))


def list_recipes() -> list[Recipe]:
    """Return all recipes, sorted by name."""
    return [_recipe_of_entry(entry) for entry in library.entries("recipes")]


def recipe_settings(
    recipe: Recipe, *, model: ModelSpec, gpu: GpuSpec, num_gpus: int, workload: TrainingWorkload
) -> dict[str, dict[str, Any]]:
    """Return the values of `training` and `parallel` that the recipe sets for a training run."""
    values: dict[str, dict[str, Any]] = {"training": {}, "parallel": {}}
    model, gpu = like_model(recipe, model), like_gpu(recipe, gpu)
    for rule in recipe.rules:
        if rule.applies_to(model=model, gpu=gpu, num_gpus=num_gpus, workload=workload):
            values["training"] |= rule.training
            values["parallel"] |= rule.parallel
    return values


def with_recipe(query: Query, *, model: ModelSpec, gpu: GpuSpec, num_gpus: int) -> Query:
    """Return the query with its recipe's values for the keys that it omits.

    The recipe also sets the framework if the query uses the default framework.
    """
    workload, parallel = query.training, query.parallel
    assert workload is not None
    if workload.recipe is not None:
        named = get_recipe(workload.recipe)
        training, knobs = _validate_values(
            recipe_settings(named, model=model, gpu=gpu, num_gpus=num_gpus, workload=workload)
        )
        framework = (
            training.framework
            if workload.framework == TrainingWorkload.framework
            else workload.framework
        )
        if workload.offload is not None:  # offload_fraction belongs to the recipe's offload.
            training = replace(training, offload_fraction=None)
        if workload.cuda_graphs is not None:  # Captured modules belong to the recipe's graphs.
            training = replace(training, cuda_graph_modules=None)
        # The gradient reduction belongs to the recipe's ZeRO stage.
        if parallel.zero_stage is not None:
            training = replace(training, gradient_reduction=None)
        workload = replace(
            _fill_open(workload, training, OF_RECIPES), framework=framework, recipe=None
        )
        if training.overlap is not None:  # Each kind separately.
            kinds = _fill_open(workload.overlap or OverlapSpec(), training.overlap, OVERLAPS)
            workload = replace(workload, overlap=kinds)
        parallel = _fill_open(parallel, knobs, PARALLEL_KNOBS)
    workload = workload.with_open_knobs()
    same = workload is query.training
    return query if same else replace(query, training=workload, parallel=parallel)


def assumed_settings(
    query: Query,
    *,
    workload: TrainingWorkload,
    parallel: ParallelQuery,
    model: ModelSpec,
    gpu: GpuSpec,
    strategy: Strategy,
) -> dict[str, object]:
    """Return the assumed values, by path, of settings that the query omits and that affect this
    training run.

    `workload` and `parallel` are those of the query with its recipe.
    """
    query_workload = query.training
    assert query_workload is not None
    knobs = _knobs.get((workload, model), (), lambda: _training_knobs(workload, model))
    values: dict[str, object] = {
        f"training.{name}": v for name, v in knobs.items() if getattr(query_workload, name) is None
    }
    if query_workload.recipe is not None and (
        words := describe_stand_in(get_recipe(query_workload.recipe), model=model, gpu=gpu)
    ):
        values["training.recipe"] = words
    if workload.framework != query_workload.framework:
        values["training.framework"] = workload.framework
    for name in PARALLEL_KNOBS:
        if getattr(query.parallel, name) is not None:
            continue
        if (value := _parallel_value(name, parallel, model, strategy)) is not None:
            values[f"parallel.{name}"] = value
    return values


_knobs: Shared[dict[str, object]] = Shared()


def _training_knobs(workload: TrainingWorkload, model: ModelSpec) -> dict[str, object]:
    set_values = {
        name: schema.to_dict(value)
        for name in OF_RECIPES
        if (value := getattr(workload, name)) is not None
    }
    return set_values | dict(_training_values(workload, model))


def _training_values(workload: TrainingWorkload, model: ModelSpec) -> Iterator[tuple[str, object]]:
    stored = stored_precision(workload)
    if workload.precision == "fp8":
        yield "fp8_recipe", workload.fp8_recipe or "delayed"
    yield "parameter_precision", stored
    if workload.lora is not None:
        yield "frozen_precision", workload.frozen_precision or stored
    yield "gradient_precision", gradient_precision(workload)
    yield "optimizer_precision", optimizer_precision(workload)
    yield "cross_entropy", workload.cross_entropy or "unfused"
    yield "cuda_graphs", bool(workload.cuda_graphs)
    overlap = workload.overlap or OverlapSpec()
    settings = {name: value for name in OVERLAPS if (value := getattr(overlap, name)) is not None}
    yield "overlap", settings or "as in the framework's measured runs"
    if model.num_experts:
        yield (
            "expert_capacity_factor",
            workload.expert_capacity_factor or "none: no token is dropped",
        )


def _parallel_value(
    name: str, parallel: ParallelQuery, model: ModelSpec, strategy: Strategy
) -> object:
    """Return the assumed value of a key of `parallel`; None if the key has no effect or a ranking
    varies it.
    """
    if name == "context_parallel_communication":
        return strategy.context_parallel_communication
    if name == "moe_token_dispatcher_type":
        return strategy.moe_token_dispatcher_type if model.num_experts else None
    value = getattr(parallel, name)
    if name == "recompute" and value is not None and not isinstance(value, tuple):
        return recompute_name(value)
    return value if isinstance(value, int) else None


def _fill_open(written: S, usual: S, names: tuple[str, ...]) -> S:
    """Return `written` with its None values in the fields `names` replaced by those of `usual`."""
    open_names = (name for name in names if getattr(written, name) is None)
    return replace(
        written,
        **{name: value for name in open_names if (value := getattr(usual, name)) is not None},
    )


def _validate_values(
    values: Mapping[str, Mapping[str, Any]],
) -> tuple[TrainingWorkload, ParallelQuery]:
    """Return the values of `training` and `parallel`, validated like a query. Other keys have their
    defaults.
    """
    sizes = {"sequence_length": 1, "global_batch_size": 1}
    return schema.parse(TrainingWorkload, {**sizes, **values["training"]}), schema.parse(
        ParallelQuery, values["parallel"]
    )


@functools.lru_cache(maxsize=256)
def _recipe_of_entry(entry: library.Entry) -> Recipe:
    content = {
        **entry.fields,
        "name": entry.name,
        "source": entry.source,
        "rules": _inherited_rules(entry),
    }
    content = _listed_fields(entry) | content
    content.pop("extends", None)
    try:
        named: Recipe = schema.parse(Recipe, content)
        for rule in named.rules:
            for section, known in (
                ("training", ("framework", *OF_RECIPES)),
                ("parallel", PARALLEL_KNOBS),
            ):
                if foreign := sorted(getattr(rule, section).keys() - set(known)):
                    raise InputError(
                        f"{section}.{foreign[0]} cannot be set by a recipe; supported: "
                        f"{', '.join(known)}"
                    )
            _validate_values({"training": rule.training, "parallel": rule.parallel})
    except InputError as error:
        raise InputError(
            f"{entry.path}: recipe {entry.name}: {error.message}", field="training.recipe"
        ) from None
    return replace(named, rules=_drop_overruled(named.rules))


def _drop_overruled(rules: tuple[RecipeRule, ...]) -> tuple[RecipeRule, ...]:
    """Return the rules without values that never apply because a later rule always overrides
    them.
    """
    remaining: list[RecipeRule] = []
    later: defaultdict[str, list[RecipeRule]] = defaultdict(list)
    """Later rules that set each key."""
    for rule in reversed(rules):
        sections = {"training": rule.training, "parallel": rule.parallel}
        effective = {
            section: {
                k: v
                for k, v in keys.items()
                if not any(each.covers(rule) for each in later[f"{section}.{k}"])
            }
            for section, keys in sections.items()
        }
        if any(effective.values()):
            remaining.append(
                replace(rule, training=effective["training"], parallel=effective["parallel"])
            )
        for section, keys in sections.items():
            for key in keys:
                later[f"{section}.{key}"].append(rule)
    return tuple(reversed(remaining))


def _listed_fields(entry: library.Entry) -> dict[str, Any]:
    """Return the LISTED_FIELDS of the entry. Omitted fields are inherited from the recipe that it
    extends.
    """
    base = entry.fields.get("extends")
    inherited = (
        {}
        if base is None
        else _listed_fields(library.entry("recipes", base, field="training.recipe"))
    )
    return inherited | {name: entry.fields[name] for name in LISTED_FIELDS if name in entry.fields}


def _inherited_rules(entry: library.Entry, *, seen: tuple[str, ...] = ()) -> list[Any]:
    """Return the rules of the recipe that the entry extends, followed by its own rules."""
    base, entry_rules = entry.fields.get("extends"), list(entry.fields.get("rules", []))
    if base is None:
        return entry_rules
    if entry.name in seen:
        raise InputError(
            f"{entry.path}: recipe {entry.name} extends itself", field="training.recipe"
        )
    return (
        _inherited_rules(
            library.entry("recipes", base, field="training.recipe"), seen=(*seen, entry.name)
        )
        + entry_rules
    )
