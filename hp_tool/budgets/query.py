"""A sizing query: parsed, checked, and what follows from it about the model, the scaling law and the compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_tool.domain.model import ModelSpec
from hp_tool.domain.sizing import SizingQuery
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.queries import schema
from hp_tool.sizing import LAWS, ScalingLaw, active_parameters, over_trained
from hp_tool.training.problem import named_model


def parse_sizing(data: Mapping[str, Any] | str | bytes) -> SizingQuery:
    """A validated sizing query from a mapping, or from JSON or YAML text. Raises InputError."""
    query: SizingQuery = schema.parse(SizingQuery, data)
    schema.check_axes(query.parallel, field="parallel")
    _check_experts(query)
    _check_together(query)
    return query


def query_model(query: SizingQuery) -> ModelSpec | None:
    """The query's model, if it names one. Raises InputError, NotFoundError, UnsupportedError."""
    if query.model is None:
        return None
    model = named_model(query.model)
    if model.architecture != "decoder":
        raise UnsupportedError(
            f"{model.name} is no decoder, and the laws were fitted on decoders; `hp-tool recommend` gives its days",
            field="model",
        )
    return model


def query_law(query: SizingQuery) -> ScalingLaw:
    """The law that divides compute between parameters and tokens."""
    ratio = query.tokens_per_parameter
    return LAWS[query.law] if ratio is None else over_trained(tokens_per_parameter=ratio)


def query_flops(query: SizingQuery, *, model: ModelSpec | None, law: ScalingLaw) -> float | None:
    """6 N D of the query's training; None if it gives only a time."""
    size = query_parameters(query, model=model)
    if query.flops is not None:
        return query.flops
    if size is not None and query.tokens is not None:
        return 6.0 * size * query.tokens
    if size is not None:
        return law.flops_of_parameters(size)
    return None if query.tokens is None else law.flops_of_tokens(query.tokens)


def query_parameters(query: SizingQuery, *, model: ModelSpec | None) -> float | None:
    """Parameters that a token passes, if the query gives a model or their number."""
    return query.parameters if model is None else active_parameters(model, sequence_length=query.sequence_length)


def _check_experts(query: SizingQuery) -> None:
    if query.experts is not None and query.experts.num_experts_per_tok > query.experts.num_experts:
        raise InputError(
            f"{query.experts.num_experts_per_tok} experts per token are more than the {query.experts.num_experts} there are",
            field="experts.num_experts_per_tok",
        )


def _check_together(query: SizingQuery) -> None:
    """Refuse a query that says too little to answer, or the same thing twice."""
    size = "model" if query.model is not None else "parameters"
    given = [name for name in (size, "tokens", "flops") if getattr(query, name) is not None]
    if query.model is not None and query.parameters is not None:
        raise InputError("model and parameters both give the size; leave one out", field="parameters")
    if len(given) == 3:
        raise InputError(f"{size}, tokens and flops: two of them give the third; leave one out", field="flops")
    if not given and query.days is None:
        raise InputError("no budget: give days with a cluster, or one of parameters, model, tokens, flops", field="days")
    if query.days is not None and query.cluster is None:
        raise InputError("days need a cluster; add one", field="cluster", code="missing_field")
    if len(given) == 2 and query.tokens_per_parameter is not None:
        raise InputError(
            f"{given[0]} and {given[1]} leave no room for tokens_per_parameter; leave one out", field="tokens_per_parameter"
        )
    if query.model is not None:
        for name in ("vocab_size", "aspect_ratio", "num_key_value_heads", "experts"):
            if getattr(query, name) is not None:
                raise InputError(f"{name} shapes a model that is looked for; model is given already", field=name)
