"""Single configurations: a query with all values chosen by a ranking or a fix, and the resolved
layout.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hp_tool.domain.fields import ChosenValues
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig, axis_values, common_settings
from hp_tool.domain.query import Query
from hp_tool.domain.serving import RUN_CONFIGS, RunConfig, config_query
from hp_tool.errors import InputError
from hp_tool.questions import schema

NUM_GPUS, LAYOUT = "cluster.num_gpus", "parallel.pipeline_layout"
SEARCH_KEYS = ("search", "id")
"""Keys of a query that do not affect the configuration."""


class Row(Protocol):
    """A row of a ranking, a fix, or a run of a search.

    It may have `set`: query values other than `parallel`, by path.
    """

    @property
    def parallel(self) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A query for a single configuration.

    The query omits values that a recipe or a default determines, so that they are resolved again.
    """

    query: Query
    """The query with all chosen values."""
    parallel: RunConfig
    """The resolved layout."""
    set: ChosenValues = field(default_factory=dict)
    """Values other than `parallel` that a ranking or a fix chose, by path."""
    adds_layout: bool = False
    """Whether `parallel` has a pipeline_layout that the original query did not set."""

    @staticmethod
    def from_row(row: Row, *, query: Query) -> Configuration:
        """Return the configuration of a row (of a ranking, a fix, or a run) that belongs to
        `query`.
        """
        values: ChosenValues = dict(getattr(row, "set", {}))
        for path, value in values.items():
            query = with_value(query, path, value)
        return _complete_configuration(row.parallel, query=query, values=values)

    def without(self, path: str) -> Configuration:
        """Return the configuration without the value of `set` at `path`."""
        values = {name: value for name, value in self.set.items() if name != path}
        return replace(self, query=with_value(self.query, path, None), set=values)

    def without_layout(self) -> Configuration:
        """Return the configuration with the framework's default stages instead of a pipeline
        layout.
        """
        assert isinstance(self.parallel, ParallelConfig)  # Serving configurations have no layout.
        parallel = replace(self.parallel, pipeline_layout=None)
        return replace(
            self, query=with_value(self.query, LAYOUT, None), parallel=parallel, adds_layout=False
        )

    @staticmethod
    def read(
        result: Mapping[str, Any], *, rank: int, parse: Callable[[Mapping[str, Any]], Query]
    ) -> Configuration:
        """Return a configuration from an answer's JSON: the recommendation with this rank, or the
        estimated configuration.

        Raises:
            InputError: The answer does not contain its query, or has no row with this rank.
        """
        query = result.get("query")
        if not isinstance(query, dict):
            raise InputError(
                "The result does not contain its query. Export the --json output of estimate, "
                "recommend or tune.",
                field="query",
                code="missing_field",
            )
        row = _select_row(result, rank)
        values = row.get("set", {})
        if not isinstance(values, dict):
            raise InputError("`set` must map paths of the query to values", field="set")
        inside = {path: value for path, value in values.items() if path != NUM_GPUS}
        typed = parse(schema.set_paths(copy.deepcopy(query), inside))
        if NUM_GPUS in values:
            typed = typed.with_num_gpus(
                schema.parse(ClusterQuery, {"num_gpus": values[NUM_GPUS]}).num_gpus
            )
        config = schema.parse(RUN_CONFIGS[typed.kind], row.get("parallel") or {})
        return _complete_configuration(config, query=typed, values=values)

    def mapping(self) -> dict[str, Any]:
        """Return the query as JSON-ready values, which every interface accepts as input."""
        return {
            name: value
            for name, value in schema.query_mapping(self.query).items()
            if name not in SEARCH_KEYS
        }

    def text(self) -> str:
        """Return the query as compact JSON. Parsing and resolving it again gives the same figures
        and intervals.
        """
        return json.dumps(self.mapping(), separators=(",", ":"), ensure_ascii=False)


def _complete_configuration(
    config: RunConfig, *, query: Query, values: ChosenValues
) -> Configuration:
    """Return the configuration with the values that the query sets for all layouts and that
    `config` lacks.
    """
    adds_layout = False
    if isinstance(config, ParallelConfig):
        adds_layout = config.pipeline_layout is not None and query.parallel.pipeline_layout is None
        whole = common_settings(query.parallel, context_parallel_size=config.context_parallel_size)
        dispatchers = axis_values(query.parallel.moe_token_dispatcher_type)
        whole["moe_token_dispatcher_type"] = dispatchers[0] if len(dispatchers) == 1 else None
        config = replace(
            config,
            **{name: value for name, value in whole.items() if getattr(config, name) is None},
        )
    return Configuration(
        query=replace(query, parallel=config_query(config)),
        parallel=config,
        set=values,
        adds_layout=adds_layout,
    )


def with_value(query: Query, path: str, value: Any) -> Query:
    """Return the query with a value set at a two-part path, such as training.offload.

    A mapping is parsed and validated like a query.
    """
    if path == NUM_GPUS:
        return query.with_num_gpus(value)
    if isinstance(value, dict):
        whole: Query = schema.parse(
            Query, schema.set_paths(schema.query_mapping(query), {path: value})
        )
        return whole
    name, _, key = path.partition(".")
    values: dict[str, Any] = {name: replace(getattr(query, name), **{key: value})}
    return replace(query, **values)


def _select_row(result: Mapping[str, Any], rank: int) -> dict[str, Any]:
    rows = result.get("recommendations")
    if rows is None and isinstance(result.get("estimate"), dict):
        rows = [result["estimate"]]
    if (
        not isinstance(rows, list)
        or not 1 <= rank <= len(rows)
        or not isinstance(rows[rank - 1], dict)
    ):
        count = len(rows) if isinstance(rows, list) else 0
        raise InputError(
            f"Rank {rank} does not exist: the result has {count} configurations.", field="rank"
        )
    row: dict[str, Any] = rows[rank - 1]
    return row
