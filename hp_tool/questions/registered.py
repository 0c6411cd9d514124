"""Replace the names of registered models, clusters and traces in a query by their
specifications.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from hp_tool import catalog
from hp_tool.catalog.traces import request_trace
from hp_tool.domain.hardware import ClusterQuery, NodeType
from hp_tool.domain.inference import TraceSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.prices import PRICED
from hp_tool.domain.query import OwnFile, Query
from hp_tool.domain.records import JsonObject, RegistrationKind
from hp_tool.domain.sizing import SizingQuery
from hp_tool.errors import ConflictError, InputError
from hp_tool.questions import schema

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
"""Pattern of registered names. They are lower-case, because the catalogue ignores case."""
Find = Callable[[RegistrationKind, str], JsonObject | None]
"""Function that returns the specification registered under a name, or None."""
Q = TypeVar("Q", Query, SizingQuery)


def checked_registration(
    *, kind: RegistrationKind, name: str, spec: JsonObject
) -> ModelSpec | NodeType | TraceSpec:
    """Return the model, server or trace to register under `name`, validated like a catalogue file.

    Raises:
        InputError: The name or a field is malformed.
        NotFoundError: The GPU of a server is not in the catalogue.
        ConflictError: `name_taken`, the catalogue already contains this name.
    """
    if not NAME.fullmatch(name) or catalog.is_file_name(name):
        raise InputError(
            f"{name!r} is not a valid name. Use up to 100 lower-case letters, digits, dots, "
            "dashes and underscores, without a file suffix.",
            field="name",
        )
    if kind != "trace" and catalog.has_entry("models" if kind == "model" else "clusters", name):
        raise ConflictError(
            f"the catalogue already has a {kind} {name!r}; choose another name",
            field="name",
            code="name_taken",
        )
    return read_spec(kind=kind, name=name, spec=spec)


def read_spec(
    *, kind: RegistrationKind, name: str, spec: JsonObject
) -> ModelSpec | NodeType | TraceSpec:
    """Parse and check the specification of a registered name.

    Raises:
        InputError: The specification is malformed.
        NotFoundError: Its GPU is not in the catalogue.
    """
    if kind == "trace":
        trace: TraceSpec = schema.parse(TraceSpec, spec)
        request_trace(trace)
        return trace
    if kind == "model":
        return catalog.model_from_mapping(_as_mapping(name, spec, field="model"))
    node = catalog.node_type_from_mapping(_as_mapping(name, spec, field="cluster"))
    catalog.gpu(node.gpu, field="cluster.gpu")
    return node


def has_registered_names(query: Query | SizingQuery) -> bool:
    """Return whether the query uses names that are not in the catalogue. They must be looked up in
    the database.
    """
    clusters = (_unknown_cluster(cluster) for cluster in _list_clusters(query))
    return any(
        name is not None
        for name in (_unknown_name("models", query.model), *clusters, _trace_name(query))
    )


def insert_registered(query: Q, *, find: Find) -> Q:
    """Return the query with registered names replaced by their specifications. Unknown names stay
    and are rejected later.
    """
    trace = _trace_name(query)
    if (
        isinstance(query, Query)
        and query.inference
        and trace is not None
        and (spec := find("trace", trace)) is not None
    ):
        query = replace(
            query, inference=replace(query.inference, trace=schema.parse(TraceSpec, spec))
        )
    query = replace(query, model=registered_model(query.model, find=find))
    clusters = tuple(_registered_cluster(cluster, find=find) for cluster in _list_clusters(query))
    return (
        query
        if clusters == _list_clusters(query)
        else replace(query, cluster=clusters if isinstance(query.cluster, tuple) else clusters[0])
    )


def restore_sent_query(sent: JsonObject, *, query: Query, resolved: Query) -> JsonObject:
    """Return the mapping that was sent, with registered names replaced as in `resolved`.

    Default values are not added, because an older edition may reject their keys and a newer edition
    may have other defaults.
    """
    return _apply_changes(
        sent, before=schema.query_mapping(query), after=schema.query_mapping(resolved)
    )


def _apply_changes(sent: JsonObject, *, before: JsonObject, after: JsonObject) -> JsonObject:
    stored = {name: value for name, value in sent.items() if name in after or name not in before}
    for name, value in after.items():
        if value != before.get(name):
            written, known = sent.get(name), before.get(name)
            nested = (
                isinstance(written, dict) and isinstance(known, dict) and isinstance(value, dict)
            )
            stored[name] = (
                _apply_changes(sent[name], before=before[name], after=value) if nested else value
            )
    return stored


def registered_model(name: Any, *, find: Find) -> Any:
    """Return the specification of a registered model. A name that is in the catalogue or unknown is
    returned unchanged.
    """
    unknown = _unknown_name("models", name)
    spec = None if unknown is None else find("model", unknown)
    return name if spec is None else {**spec, "name": unknown}


def _with_node_defaults(wanted: ClusterQuery, node: NodeType) -> ClusterQuery:
    """Return the query's cluster, with omitted fields filled from the registered server."""
    if wanted.gpu is not None and wanted.gpu != node.gpu:
        raise InputError(
            f"{node.name} has {node.gpu}, not {getattr(wanted.gpu, 'name', wanted.gpu)}; remove "
            "gpu or "
            "node_type",
            field="cluster.gpu",
        )
    shared = (name for name in NodeType.__slots__ if name in ClusterQuery.__slots__)
    cluster = replace(
        wanted,
        node_type=None,
        **{name: getattr(node, name) for name in shared if getattr(wanted, name) is None},
    )
    domain = cluster.nvlink_domain_size or node.gpus_per_node
    if wanted.nvlink_domain_size is None:
        per_node = cluster.gpus_per_node or node.gpus_per_node
        domain = max(per_node, domain - domain % per_node)
    return replace(
        cluster,
        name=wanted.name or node.name,
        num_gpus=cluster.num_gpus or node.gpus_per_node,
        nvlink_domain_size=domain,
    )


def _as_mapping(name: str, spec: JsonObject, *, field: str) -> JsonObject:
    if spec.get("name", name) != name:
        raise InputError(
            f"name {spec['name']!r} differs from the registered name {name!r}",
            field=f"{field}.name",
        )
    return {**spec, "name": name}


def _list_clusters(query: Query | SizingQuery) -> tuple[Any, ...]:
    """Return the query's cluster, or each cluster of its list."""
    return query.cluster if isinstance(query.cluster, tuple) else (query.cluster,)


def _unknown_cluster(cluster: Any) -> str | None:
    """Return the name of a cluster that is not in the catalogue and therefore may be registered;
    else None.
    """
    name = cluster.node_type if isinstance(cluster, ClusterQuery) else cluster
    return None if name == PRICED else _unknown_name("clusters", name)


def _registered_cluster(cluster: Any, *, find: Find) -> Any:
    """Return the cluster with the specification registered under its name, if any."""
    name = _unknown_cluster(cluster)
    if name is None or (spec := find("cluster", name)) is None:
        return cluster
    node = catalog.node_type_from_mapping({**spec, "name": name})
    return _with_node_defaults(
        cluster if isinstance(cluster, ClusterQuery) else ClusterQuery(), node
    )


def _trace_name(query: Query | SizingQuery) -> str | None:
    """Return the name of a registered trace; None for a local file."""
    trace = query.inference.trace if isinstance(query, Query) and query.inference else None
    return (
        trace
        if isinstance(trace, str) and not isinstance(trace, OwnFile) and NAME.fullmatch(trace)
        else None
    )


def _unknown_name(kind: catalog.Kind, name: object) -> str | None:
    small = name.casefold() if isinstance(name, str) else ""
    return small if NAME.fullmatch(small) and not catalog.has_entry(kind, small) else None
