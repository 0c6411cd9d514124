"""Export configurations to other tools, and rank the layouts that a tool supports."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

from hp_tool.domain.frameworks import training_engine
from hp_tool.domain.knobs import FREE_PATHS
from hp_tool.domain.parallel import STRATEGY_FIELDS, ParallelQuery, axis_values
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.serving import PoolConfig
from hp_tool.domain.units import MIN_CHANGE
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.registry import Format, Kind, formats, get_format, writable
from hp_tool.questions import schema, training
from hp_tool.questions.answers import RecommendAnswer
from hp_tool.questions.configuration import LAYOUT, Configuration
from hp_tool.questions.problem import problem_of
from hp_tool.questions.serving.disaggregated import rank_pools
from hp_tool.questions.serving.setup import pool_setups
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.only_layout import estimate_only_layout
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.usual_settings import answer_with_usual_settings
from hp_tool.questions.training.with_recipe import changed_settings, inserted_settings

Expressed = TypeVar("Expressed")
FRAMEWORK_KEYS = ("framework_version", "recipe", "overlap")
"""Keys of `training` that are specific to one framework."""
MEGATRON_KEYS = (
    "cross_entropy",
    "cuda_graphs",
    "fp8_recipe",
    "optimizer_precision",
    "exp_avg_sq_precision",
    "master_precision",
)
"""Keys set by a ranking that only Megatron Core supports."""
MAX_ATTEMPTS = 200
"""Maximum number of ranked configurations to try to write in a tool's format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A configuration in another tool's format.

    If layouts were ranked again for the tool, it includes the resulting slowdown.
    """

    format: str
    text: str
    framework: str | None = None
    """The tool's framework; like the fields below, set only after ranking again for the tool."""
    parallel: dict[str, Any] | None = None
    step_s: float | None = None
    best_step_s: float | None = None
    """Step time of the query's own best configuration; None without one."""
    cost_fraction: float | None = None
    """Relative slowdown against the query's best configuration: 0.1 is 10% slower."""
    left_out: tuple[str, ...] = ()
    """Keys of the query that were omitted because the tool has no setting for them."""
    notes: tuple[str, ...] = ()
    """What the user must do so that the configuration runs as predicted."""

    def cost_in_words(self) -> str:
        """Return a sentence about the slowdown of the second ranking; empty without one."""
        if self.step_s is None:
            return ""
        cost = ""
        if self.cost_fraction is not None:
            same = abs(self.cost_fraction) < MIN_CHANGE
            cost = ", as fast as" if same else f", {self.cost_fraction:+.1%} against"
            cost += " the query's own best"
        out = (
            f"; left out, as it has no setting for them: {', '.join(self.left_out)}"
            if self.left_out
            else ""
        )
        return (
            f"ranked for {self.format} ({self.framework}): step time {self.step_s:.3g} s{cost}{out}"
        )


def export(
    *,
    result: Mapping[str, Any],
    format: str,
    rank: int = 1,
    read: Callable[[Mapping[str, Any]], Query] = schema.parse_query,
) -> str:
    """Return only the text of `export_configuration`, which documents the errors."""
    return export_configuration(result=result, format=format, rank=rank, read=read).text


def export_configuration(
    *,
    result: Mapping[str, Any],
    format: str | None,
    rank: int = 1,
    read: Callable[[Mapping[str, Any]], Query] = schema.parse_query,
) -> Exported:
    """Return one configuration in another tool's format, with notes for the user.

    A query that allows a single layout is estimated; other queries are ranked. A query with pools
    (inference.disaggregated) is written as pools.

    Args:
        result: JSON answer of estimate, recommend or tune (its `query` contains model and
            workload), or a query.
        format: Name of the format; None: that of the query's framework or engine.
        rank: Rank of the recommendation.
        read: Parses the query.

    Raises:
        InputError: The result or the rank is invalid.
        UnsupportedError: The tool cannot express the configuration.
    """
    if format is not None:
        _get_writer(format)
    if (pools_query := _pools_query(result)) is not None:
        rows = None if pools_query is result else result.get("disaggregated")
        query = read(pools_query)
        tool = _get_writer(format or _default_format(query))
        return Exported(format=tool.name, text=_export_pools(query, tool, rank, rows=rows))
    if "kind" in result:
        configuration = _select_configuration(read(result), rank)
    else:
        configuration = Configuration.read(result, rank=rank, parse=read)
    return write_configuration(configuration, format or _default_format(configuration.query))


def _default_format(query: Query) -> str:
    """Return the format of the query's framework or engine.

    Raises:
        InputError: The framework or engine has no format.
    """
    if query.training is not None:
        runs = resolve_training(query).workload.framework
    else:
        runs = query.inference.engine if query.inference is not None else ""
    for name in (runs, training_engine(runs)):
        for tool_format in formats(query.kind):
            if tool_format.write is not None and name in (tool_format.name, tool_format.usual_of):
                return tool_format.name
    raise InputError(
        f"no export format for {runs}; choose one with --format, or --for to rank for it",
        field="format",
    )


def _pools_query(result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the query, also from an answer, if it has prefill and decode pools, else None."""
    query = result if "kind" in result else result.get("query")
    workload = query.get("inference") if isinstance(query, Mapping) else None
    pools = isinstance(workload, Mapping) and workload.get("disaggregated") is not None
    return query if pools and isinstance(query, Mapping) else None


def _export_pools(query: Query, tool: Format[Any], rank: int, *, rows: Any) -> str:
    """Return the pools of the recommendation with this rank as text."""
    if tool.write_pools is None:
        supported = ", ".join(
            tool_format.name
            for tool_format in formats("inference")
            if tool_format.write_pools is not None
        )
        raise UnsupportedError(
            f"{tool.name} cannot describe separate prefill and decode pools; choose "
            f"{supported}, or remove inference.disaggregated",
            field="inference.disaggregated",
        )
    if rows is None:
        pairs = [(row.prefill, row.decode) for row in rank_pools(query=query, top=rank)]
    else:
        pairs = [
            tuple(schema.parse(PoolConfig, row[pool]) for pool in ("prefill", "decode"))
            for row in rows
        ]
    if len(pairs) < rank:
        raise InputError(
            f"Rank {rank} does not exist: {len(pairs)} pairs of pools satisfy the constraints.",
            field="rank",
        )
    prefill, decode = pairs[rank - 1]
    return tool.write_pools(*pool_setups(query, prefill=prefill, decode=decode))


def _select_configuration(query: Query, rank: int) -> Configuration:
    """Return the only configuration of a query, or the recommendation with this rank."""
    if rank == 1 and (estimate := estimate_only_layout(query)) is not None:
        return Configuration.from_row(estimate, query=query)
    ranking = problem_of(query).rank(top=rank)
    if (count := len(ranking.recommendations)) < rank:
        raise InputError(
            f"Rank {rank} does not exist: {count} configurations satisfy the constraints.",
            field="rank",
        )
    return Configuration.from_row(ranking.recommendations[rank - 1], query=query)


def write_configuration(configuration: Configuration, format: str) -> Exported:
    """Return a configuration in a format, with notes for the user.

    If the tool lacks a setting that a ranking chose and that does not change the numerics, the
    setting is omitted and a note reports it.

    Raises:
        UnsupportedError: The format cannot express the configuration.
        InputError: The format is unknown.
    """
    text, _, notes = _write_as_predicted(configuration, partial(write_text, format=format))
    return Exported(format=format, text=text, notes=(*notes, *get_format(format).notes(text)))


def _write_as_predicted(
    configuration: Configuration, write: Callable[[Configuration], Expressed]
) -> tuple[Expressed, float | None, tuple[str, ...]]:
    """Return the exported text, the predicted step time in seconds, and notes.

    The text includes the usual settings that the estimate assumes, as far as the tool supports
    them; the step time is predicted for the settings in the text. It is None for serving.

    Raises:
        UnsupportedError: The tool cannot express the configuration, or lacks usual settings without
            which the configuration does not fit in memory.
    """
    if configuration.query.training is None:
        text, expressed = _drop_unsupported(configuration, write)
        return text, None, _script_settings(configuration, expressed)
    query, estimate = answer_with_usual_settings(configuration.query)
    if query is configuration.query:
        text, expressed = _drop_unsupported(configuration, write)
        return text, _step_s(expressed), _script_settings(configuration, expressed)
    plain, with_usual = (
        resolve_configuration(each).problem for each in (configuration.query, query)
    )
    values = _usual_values(plain, with_usual) | _inserted_values(configuration.query, query)
    text, chosen, expressed = _state_values(configuration, values, write=write)
    stated = resolve_configuration(expressed.query).estimate(with_fixes=False)
    assert estimate.time is not None and stated.time is not None  # The layout is legal.
    if estimate.feasible and not stated.feasible:
        raise UnsupportedError(
            "this layout fits in memory only with settings that the format cannot set "
            f"together: {_assignments(values)}; choose another layout, or rank for the tool "
            "with --for",
            field="training.recipe",
        )
    notes = _script_settings(chosen, expressed)
    if not math.isclose(stated.time.step_s, estimate.time.step_s, rel_tol=1e-9):
        notes += (
            f"the prediction assumes {_assignments(values)}, which cannot all be set here: a step "
            f"takes {estimate.time.step_s:.4g} s with it, {stated.time.step_s:.4g} s without",
        )
    return text, stated.time.step_s, notes


def _usual_values(plain: TrainingProblem, with_usual: TrainingProblem) -> dict[str, Any]:
    """Return the training settings, by path, that the usual settings change."""
    changes = changed_settings(before=plain, after=with_usual)
    return {path: value for path, value in changes.items() if path.startswith("training.")}


def _inserted_values(query: Query, with_usual: Query) -> dict[str, Any]:
    """Return the training settings, by path, that the usual settings add, except the recipe."""
    return {
        path: value
        for path, value in inserted_settings(query, with_usual).items()
        if path.startswith("training.") and path != "training.recipe"
    }


def _assignments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{path}={value}" for path, value in values.items())


def _state_values(
    configuration: Configuration,
    values: Mapping[str, Any],
    *,
    write: Callable[[Configuration], Expressed],
) -> tuple[Expressed, Configuration, Configuration]:
    """Return the text with those of `values` that the tool supports.

    Also return the configuration with these values, before and after `_drop_unsupported`. Values
    that the tool lacks remain unset; the in-place loss becomes the fused loss.
    """
    stated = dict(values)
    while True:
        query = schema.set_paths(schema.query_mapping(configuration.query), stated)
        chosen = replace(configuration, query=schema.parse_query(query))
        try:
            text, expressed = _drop_unsupported(chosen, write)
        except (InputError, UnsupportedError) as error:
            path = error.field or ""
            if path not in stated:
                raise
            if stated[path] == "in_place":
                stated[path] = "fused"
            else:
                del stated[path]
            continue
        if resolve_configuration(expressed.query).reasons and stated:
            stated.clear()  # These settings are valid only as part of the recipe.
            continue
        return text, chosen, expressed


def _drop_unsupported(
    configuration: Configuration, write: Callable[[Configuration], Expressed]
) -> tuple[Expressed, Configuration]:
    """Return the text and the configuration, both without optional settings that the tool lacks."""
    while True:
        try:
            return write(configuration), configuration
        except UnsupportedError as error:
            if error.field == LAYOUT and configuration.adds_layout:
                configuration = configuration.without_layout()
            elif error.field in FREE_PATHS and error.field in configuration.set:
                configuration = configuration.without(error.field)
            else:
                raise


def _script_settings(configuration: Configuration, expressed: Configuration) -> tuple[str, ...]:
    left = [path for path in configuration.set if path not in expressed.set]
    names = ", ".join(
        [*left, *([LAYOUT] if configuration.adds_layout > expressed.adds_layout else [])]
    )
    if not names:
        return ()
    times = (f"{_step_s(each):.4g} s" for each in (configuration, expressed))
    return (
        f"the ranking took {names}, for which there is no setting here: a step takes "
        f"{' with it, '.join(times)} without",
    )


def _step_s(configuration: Configuration) -> float:
    estimate, _ = problem_of(configuration.query).estimate(with_fixes=False)
    assert isinstance(estimate, Estimate) and estimate.time is not None  # it was recommended
    return estimate.time.step_s


def export_for_tool(
    *,
    result: Mapping[str, Any],
    format: str,
    read: Callable[[Mapping[str, Any]], Query] = schema.parse_query,
) -> Exported:
    """Rank the layouts that this format's tool supports, and write the best one.

    Raises:
        InputError: The format is unknown, or nothing fits.
        UnsupportedError: The tool cannot express any of the best layouts.
    """
    tool = _get_writer(format, field="for")
    query = read(result if "kind" in result else result.get("query") or {})
    if query.training is None:
        raise InputError(
            f"{format} is a training format; for a serving configuration, choose one of: "
            f"{', '.join(writable('inference'))}",
            field="for",
        )
    query_best = next(iter(training.recommend(query=query, top=1).recommendations), None)
    ranked, left_out = _restrict_query(replace(query, objective=None), tool)
    assert ranked.training is not None
    answer = training.recommend(query=ranked, top=MAX_ATTEMPTS)
    refusal: UnsupportedError | None = None
    for row in answer.recommendations:
        chosen = Configuration.from_row(row, query=ranked)
        try:
            text, step_s, notes = _write_as_predicted(chosen, partial(write_text, format=format))
        except UnsupportedError as error:
            refusal = refusal or error
            continue
        best = (
            query_best.estimate.time.step_s
            if query_best is not None and query_best.estimate.time is not None
            else None
        )
        assert step_s is not None  # the query is a training
        return Exported(
            format=format,
            text=text,
            framework=ranked.training.framework,
            parallel=schema.to_dict(row.parallel),
            step_s=step_s,
            best_step_s=best,
            cost_fraction=None if best is None else step_s / best - 1.0,
            left_out=left_out,
            notes=(*notes, *tool.notes(text)),
        )
    why = ", ".join(f"{name} {count:,}" for name, count in answer.rejections.items() if count)
    best_workload = (
        None
        if query_best is None
        else Configuration.from_row(query_best, query=query).query.training
    )
    offloads = best_workload is not None and best_workload.offload not in (None, "none")
    hint = "; the query's best layout offloads to host memory" if offloads else ""
    hint += f"; left out, as it has no setting for them: {', '.join(left_out)}" if left_out else ""
    raise refusal or InputError(
        f"no layout that {format} supports fits this query (rejected: {why}){hint}",
        field="for",
        code="infeasible",
    )


def recommend_for_tool(
    query: Query, format: str, rank_layouts: Callable[[Query, int], RecommendAnswer], *, top: int
) -> tuple[RecommendAnswer, tuple[str, ...]]:
    """Rank the layouts that a format's tool supports, under its framework or engine.

    Return the best `top` rows with new ranks, and the query keys that the tool has no setting for.

    Args:
        query: The query.
        format: Name of a format that configurations are written in.
        rank_layouts: Returns the answer to a query with a maximum number of rows.
        top: Maximum number of rows.

    Raises:
        InputError: The format is unknown, or nothing that the tool supports fits.
        UnsupportedError: The tool cannot express any of the best layouts.
    """
    writable_formats = {
        tool_format.name: tool_format
        for tool_format in formats(query.kind)
        if tool_format.write is not None
    }
    if format not in writable_formats:
        raise InputError(
            f"no {query.kind} format is named {format}; choose one of: "
            f"{', '.join(writable_formats)}",
            field="for",
        )
    left_out: tuple[str, ...] = ()
    tool = writable_formats[format]
    if query.training is not None:
        query, left_out = _restrict_query(query, tool)
    elif query.inference is not None and tool.usual_of not in (None, query.inference.engine):
        engine = replace(query.inference, engine=tool.usual_of, engine_version=None)
        query = replace(query, inference=engine)
    answer = rank_layouts(query, max(top, MAX_ATTEMPTS))
    rows: list[Any] = []
    refusal: UnsupportedError | None = None
    for row in answer.recommendations:
        refused = _unsupported_error(row, query, format=format)
        refusal = refusal or refused
        if refused is None:
            rows.append(replace(row, rank=len(rows) + 1))
        if len(rows) == top:
            break
    if refusal is not None and not rows:
        raise refusal
    fronts: dict[str, Any] = {
        name: front
        and tuple(row for row in front if _unsupported_error(row, query, format=format) is None)
        for name, front in (
            ("pareto", answer.pareto),
            ("throughput_front", answer.throughput_front),
        )
    }
    groups = () if refusal is not None else answer.groups  # Groups would count rejected rows, too.
    return replace(answer, recommendations=tuple(rows), groups=groups, **fronts), left_out


def _unsupported_error(row: Any, query: Query, *, format: str) -> UnsupportedError | None:
    """Return the error if the tool cannot express the recommendation, else None."""
    try:
        _drop_unsupported(
            Configuration.from_row(row, query=query), partial(write_text, format=format)
        )
    except UnsupportedError as error:
        return error
    return None


def _restrict_query(query: Query, tool: Format[Any]) -> tuple[Query, tuple[str, ...]]:
    """Return the query restricted to what the tool supports, and the keys that were omitted."""
    assert query.training is not None
    workload, left_out = _restrict_workload(tool, query.training)
    same = workload.framework == query.training.framework
    ranked = replace(query, training=workload)
    parallel, beyond = _restrict_axes(
        query.parallel, supported_axes(tool.name, ranked), without=() if same else STRATEGY_FIELDS
    )
    return replace(ranked, parallel=parallel), (*left_out, *beyond)


def _restrict_workload(
    tool: Format[Any], workload: TrainingWorkload
) -> tuple[TrainingWorkload, tuple[str, ...]]:
    """Return the workload restricted to what the tool supports, and the keys that were omitted."""
    adapted = replace(workload, framework=tool.framework or workload.framework)
    left_out = []
    if adapted.framework != workload.framework:
        for name in (
            *FRAMEWORK_KEYS,
            *(() if training_engine(adapted.framework) == "megatron-core" else MEGATRON_KEYS),
        ):
            default = next(f.default for f in fields(workload) if f.name == name)
            if getattr(workload, name) != default:
                open_again: dict[str, Any] = {name: default}
                adapted = replace(adapted, **open_again)
                left_out.append(f"training.{name}")
    if adapted.cross_entropy is None and tool.loss is not None:
        adapted = replace(adapted, cross_entropy=tool.loss)
    full = workload.lora is None and workload.framework != tool.framework
    if full and workload.parameter_precision is None and tool.trained_weights is not None:
        adapted = replace(adapted, parameter_precision=tool.trained_weights)
    return adapted, tuple(left_out)


def _restrict_axes(
    parallel: ParallelQuery, axes: Mapping[str, Any], *, without: Collection[str]
) -> tuple[ParallelQuery, tuple[str, ...]]:
    """Return the query's axes restricted to the tool's values, and the axes that were restricted.

    `axes` contains the tool's values by axis, `without` the axes that its framework does not have.
    """
    values: dict[str, Any] = dict.fromkeys(without)
    left_out = [name for name in without if getattr(parallel, name) is not None]
    for name, can in axes.items():
        requested, supported = (
            axis_values(getattr(parallel, name)),
            [_normalize_value(axis_value) for axis_value in axis_values(can)],
        )
        both = tuple(each for each in requested if _normalize_value(each) in supported)
        values[name] = both or can
        if requested and not both:
            left_out.append(name)
    return replace(parallel, **values), tuple(
        f"parallel.{name}" for name in dict.fromkeys(left_out)
    )


def _normalize_value(value: Any) -> Any:
    """Return the value of an axis, with one spelling for full-layer recomputation."""
    return "full" if value == "per_layer" else value


def _get_writer(name: str, *, field: str = "format") -> Format[Any]:
    """Return the writable format with this name.

    Raises:
        InputError: No writable format has this name.
    """
    kinds: tuple[Kind, ...] = ("training",) if field == "for" else ("training", "inference")
    writable_formats = {
        tool_format.name: tool_format
        for kind in kinds
        for tool_format in formats(kind)
        if tool_format.write is not None
    }
    if name not in writable_formats:
        to_rank = " to rank for" if field == "for" else ""
        raise InputError(
            f"no format is named {name}{to_rank}; choose one of: {', '.join(writable_formats)}",
            field=field,
        )
    return writable_formats[name]


def supported_axes(tool: str, query: Query) -> dict[str, Any]:
    """Return the values of each `parallel` axis that the query's tool supports."""
    fsdp = query.training is not None and training_engine(query.training.framework) == "torch-fsdp"
    return dict(get_format(tool).fsdp_axes if fsdp else get_format(tool).axes)


def write_text(configuration: Configuration, format: str) -> str:
    """Return the configuration as text in a format.

    Raises:
        UnsupportedError: The format cannot express it.
        InputError: The format is unknown.
    """
    writers = {
        tool_format.name: tool_format.write
        for tool_format in formats(configuration.query.kind)
        if tool_format.write is not None
    }
    if format not in writers:
        verb, kind = (
            ("trains", "serving")
            if configuration.query.kind == "inference"
            else ("serves", "training")
        )
        raise InputError(
            f"{format} {verb}; for a {kind} configuration, choose one of: {', '.join(writers)}",
            field="format",
        )
    return writers[format](problem_of(configuration.query).setup(configuration))


def tool_options(
    configuration: Configuration, format: str, *, as_predicted: bool = False
) -> dict[str, str]:
    """Return a configuration as the tool's flags or keys, each with its value.

    `as_predicted` adds the usual settings that the estimate assumes.

    Raises:
        UnsupportedError: The format has no flags or keys, or cannot express the configuration.
    """
    tool = get_format(format)
    if tool.options is None or tool.kind != configuration.query.kind:
        raise UnsupportedError(f"{format} has no flags or keys to compare", field="format")
    say = tool.options

    def options_of(each: Configuration) -> dict[str, str]:
        return say(problem_of(each.query).setup(each))

    write = _write_as_predicted if as_predicted else _drop_unsupported
    return write(configuration, options_of)[0]


def changed_options(
    before: Mapping[str, str], after: Mapping[str, str]
) -> tuple[dict[str, str | None], ...]:
    """Return {flag, from, to} for each option that differs between two configurations.

    A value is None if the option is not set.
    """
    return tuple(
        {"flag": name, "from": before.get(name), "to": after.get(name)}
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    )
