"""Addresses of pages that show one configuration. The whole question stands in them, so that a link can be shared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from hp_tool.domain.parallel import ParallelConfig, recompute_name
from hp_tool.domain.query import Query
from hp_tool.domain.serving import ServingConfig
from hp_tool.queries import schema

MAX_QUERY = 20_000
"""Characters of a query in an address."""
BESIDE = ("search", "id")
"""Of a query, what says nothing about a configuration."""


def configuration_href(query: Query | Mapping[str, Any], *, parallel: ParallelConfig | ServingConfig | None = None) -> str:
    """The page of the configuration `parallel` of a query; of the query's own where None."""
    return f"/configurations?{urlencode({'query': configuration_text(query, parallel=parallel)})}"


def compare_href(first: str, second: str) -> str:
    """Two configurations side by side, each as `configuration_text`."""
    return f"/compare?{urlencode({'first': first, 'second': second})}"


def configuration_text(query: Query | Mapping[str, Any], *, parallel: ParallelConfig | ServingConfig | None = None) -> str:
    """The query of one configuration as compact JSON."""
    mapping = schema.query_mapping(query) if isinstance(query, Query) else dict(query)
    if parallel is not None:
        values = schema.to_dict(parallel)
        mapping["parallel"] = {name: value for name, value in values.items() if value is not None}
    kept = {name: value for name, value in mapping.items() if name not in BESIDE}
    return json.dumps(kept, separators=(",", ":"), ensure_ascii=False)


def explorer_href(query: Query, parallel: ParallelConfig | None) -> str | None:
    """The explorer at this configuration; None where its controls cannot say all of the question's main points."""
    cluster, training = query.cluster, query.training
    if training is None or not isinstance(query.model, str) or isinstance(cluster, str) or not isinstance(cluster.gpu, str):
        return None
    values: dict[str, Any] = {
        "model": query.model,
        "gpu": cluster.gpu,
        "num_gpus": cluster.num_gpus,
        "sequence_length": training.sequence_length,
        "global_batch_size": training.global_batch_size,
        "precision": training.precision,
        "attention": training.attention,
    }
    if parallel is not None:
        values |= {
            "tp": parallel.tensor_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            "vpp": parallel.virtual_pipeline_parallel_size,
            "cp": parallel.context_parallel_size,
            "ep": parallel.expert_parallel_size,
            "mbs": parallel.micro_batch_size,
            "recompute": recompute_name(parallel.recompute).split()[0],
            "zero": parallel.zero_stage,
            "sp": "on" if parallel.sequence_parallel else "off",
        }
    return f"/explorer?{urlencode(values)}"
