"""The query of the explorer page. The URL contains its values by path, as the form does.

Paths that start with `at.` describe the displayed configuration. They are not part of the query: a
ranking or a slider selected them, and they are dropped when the query changes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from urllib.parse import parse_qsl

from hp_tool.domain.prices import PRICED
from hp_tool.domain.query import Kind
from hp_tool.errors import InputError
from hp_tool.questions import schema
from hp_tool.questions.configuration import SEARCH_KEYS, Configuration
from hp_tool.questions.form_fields import OTHER_KIND, RECOMPUTE, Section, form_fields, form_sections
from service.dashboard.formats import dotted
from service.dashboard.new_search_form import EXTRA, check_names, kind_of, to_query, to_values
from service.dashboard.page import address

PATH = "/explorer"
AT = "at."
TRAINING = ("kind", "training")
"""Kind of query if the URL contains none."""
MAX_FIELDS = 250
"""Maximum number of fields in a URL. Without scripts, forms also send blank fields."""
GPU, NUM_GPUS, NODE_TYPE = MACHINES = ("cluster.gpu", "cluster.num_gpus", "cluster.node_type")
"""Paths that describe several machines if their values are comma-separated lists."""
OF_MACHINES = (
    *MACHINES,
    "cluster.market",
    "cluster.interruptions_per_node_day",
    "cluster.power_cap_w",
    "cluster.price_per_gpu_hour",
)
"""Fields of the tab for several machines."""
SENTENCE = {
    *("model", GPU, NUM_GPUS, "training.sequence_length", "training.global_batch_size"),
    *("inference.input_length", "inference.output_length"),
}
"""Fields in the sentence that describes the query."""
OF_ONE = {"inference.concurrency"}
OF_SEVERAL = {
    *("cluster", "training.total_tokens", "constraints.max_days", "constraints.max_cost"),
    *("inference.request_rate_per_second", "targets.ttft_s", "targets.tpot_s"),
}
"""Additional fields in this sentence for one machine, and for several machines."""
FAST = ("h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb")
"""GPUs that are preselected on the tab for several machines."""
EXAMPLES: dict[Kind, dict[str, str]] = {
    "training": {
        "model": "llama-3-70b",
        GPU: FAST[0],
        NUM_GPUS: "64",
        "training.sequence_length": "8192",
        "training.global_batch_size": "512",
    },
    "inference": {
        "model": "llama-3-70b",
        GPU: FAST[0],
        NUM_GPUS: "8",
        "inference.input_length": "4000",
        "inference.output_length": "1000",
        "inference.concurrency": "64",
    },
}
"""Example values for required fields that the URL omits."""
SEVERAL: dict[Kind, dict[str, str]] = {
    "training": {
        "training.total_tokens": "1e11",
        "constraints.max_days": "21",
        "model": "llama-3.1-8b",
    },
    "inference": {
        "model": "llama-3.1-8b",
        "inference.request_rate_per_second": "8",
        "targets.ttft_s": "1",
        "targets.tpot_s": "0.05",
    },
}
"""Default values of a query for several machines."""
NOT_ASKED = (*SEARCH_KEYS, "trainer", "name")
"""Fields that only searches use."""
DERIVED = ("data_parallel_size", "pipeline_layout")
"""Layout fields that follow from the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The query and the displayed configuration, as texts by path."""

    values: dict[str, str]
    """Values of the query, with example values for missing ones."""
    at: dict[str, str] = field(default_factory=dict)
    """Values of the displayed configuration; empty for the best one."""

    @staticmethod
    def read(text: str) -> Question:
        """Parse the query string of a URL.

        Raises:
            InputError: The URL has too many fields, or one that is not a field of a query.
        """
        try:
            pairs = parse_qsl(text, max_num_fields=MAX_FIELDS)
        except ValueError:
            raise InputError(
                f"The URL has more than {MAX_FIELDS} query parameters.", code="bad_request"
            ) from None
        texts: dict[str, list[str]] = {}
        for name, value in pairs:
            if value.strip():
                texts.setdefault(name, []).append(value.strip())
        typed = {name: _joined(name, parts) for name, parts in texts.items()}
        at = {
            name.removeprefix(AT): typed.pop(name)
            for name in list(typed)
            if name.startswith(AT) and name != AT
        }
        typed.pop("done", None)
        check_names(typed)
        if typed.get("kind", "training") not in OTHER_KIND:
            raise InputError("`kind` must be training or inference.", field="kind")
        return Question(values=_filled(typed), at=at)

    @property
    def kind(self) -> Kind:
        return kind_of(self.values)

    @property
    def several(self) -> bool:
        """Whether the query compares machines."""
        listed = any("," in self.values.get(path, "") for path in MACHINES)
        return listed or PRICED in (
            *split_names(self.values.get(NODE_TYPE)),
            self.values.get("cluster"),
        )

    def mapping(self) -> dict[str, Any]:
        """Return the query as a mapping that is not validated yet.

        Raises:
            InputError: A value is invalid.
        """
        others = tuple(f"{name}." for name in OTHER_KIND[self.kind])
        query = to_query(
            {path: text for path, text in self.values.items() if not path.startswith(others)}
        )
        if isinstance(query.get("cluster"), dict):
            query["cluster"] = _machines(query["cluster"])
        return query

    def shown_mapping(self) -> dict[str, Any]:
        """Return the query of the displayed configuration as a mapping.

        Raises:
            InputError: A value is invalid.
        """
        query, at = self.mapping(), to_query({"kind": self.kind, **self.at})
        if at.get("parallel", {}).get("pipeline_parallel_size") == 1:
            # There is nothing to interleave.
            at["parallel"].pop("virtual_pipeline_parallel_size", None)
        for name, value in at.items():
            below = query.get(name)
            query[name] = below | value if isinstance(below, dict) else value
        return query

    def normal(self) -> Question:
        """Return the query as its form shows it, with paths that have no field in its YAML."""
        asked = {path: text for path, text in self.values.items() if path not in OF_MACHINES}
        with contextlib.suppress(InputError):  # The answer reports the error.
            kept = {p: asked.get(p, text.strip()) for p, text in to_values(to_query(asked)).items()}
            others = form_fields("training" if self.kind == "inference" else "inference")
            kept = {path: text for path, text in asked.items() if path in others} | kept
            return replace(
                self,
                values=kept | {p: self.values[p] for p in OF_MACHINES if p in self.values},
            )
        return self

    @property
    def asked(self) -> dict[str, str]:
        """The values, without `kind` if it is the default."""
        return {path: text for path, text in self.values.items() if (path, text) != TRAINING}

    def href(self, at: Mapping[str, str] | None = None) -> str:
        """Return the page's URL for another displayed configuration."""
        at = self.at if at is None else at
        return address(PATH, self.asked | {f"{AT}{path}": text for path, text in at.items()})

    def tab_href(self, kind: Kind, *, several: bool) -> str:
        """Return the URL of the same query for another kind or number of machines."""
        values = {path: text for path, text in self.values.items() if path != "kind"}
        if kind != self.kind:
            for path in ("objective", "rank_by", EXTRA):
                values.pop(path, None)
        if several and not self.several:
            values.pop("cluster", None)
            gpus = dict.fromkeys((values.get(GPU, FAST[0]), *FAST))
            values |= {NODE_TYPE: PRICED, GPU: ", ".join(gpus)}
        if self.several and not several:
            values.pop(NODE_TYPE)
            values |= {
                path: split_names(values[path])[0]
                for path in (GPU, NUM_GPUS)
                if split_names(values.get(path))
            }
        return Question(values={"kind": kind, **values}).href()


def question_of(configuration: Configuration) -> Question | None:
    """Return a configuration's query, with this configuration displayed.

    Return None if its model or its devices have no name.
    """
    query = configuration.query
    mapping = {
        name: value
        for name, value in schema.query_mapping(query).items()
        if name not in (*NOT_ASKED, "parallel")
    }
    cluster = mapping["cluster"]
    if isinstance(cluster, Mapping) and not isinstance(cluster.get("node_type"), str):
        cluster = cluster.get("gpu") if cluster.get("num_gpus") else None
    elif isinstance(cluster, Mapping):
        cluster = cluster["node_type"]
    if not (isinstance(mapping["model"], str) and isinstance(cluster, str)):
        return None
    return Question(values=to_values(mapping), at=layout_values(configuration))


def layout_values(configuration: Configuration) -> dict[str, str]:
    """Return a configuration by path: its layout, and the settings that a ranking chose with it."""
    layout = schema.to_dict(configuration.parallel)
    stages = None if configuration.adds_layout else configuration.query.parallel.pipeline_layout
    if not layout.get("data_parallel_shard_size"):
        # The shard group contains all replicas, which is the default.
        layout.pop("data_parallel_shard_size", None)
    if isinstance(recompute := layout.get("recompute"), dict):
        layout["recompute"] = {name: one for name, one in recompute.items() if one is not None}
    chosen = {
        name: value for name, value in layout.items() if value is not None and name not in DERIVED
    } | ({} if stages is None else {"pipeline_layout": stages})
    values = to_values(
        schema.set_paths({"kind": configuration.query.kind, "parallel": chosen}, configuration.set)
    )
    del values["kind"]
    if EXTRA in values:  # Paths that have no field.
        rest = dotted(schema.read_yaml(values.pop(EXTRA)))
        values |= {path: json.dumps(value) for path, value in rest.items()}
    return values


def split_names(text: str | None) -> list[str]:
    """Split a comma-separated list of names."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


@cache
def further_sections(kind: Kind, *, several: bool) -> tuple[Section, ...]:
    """Return the form sections with further settings, without those of searches."""
    elsewhere = SENTENCE | (OF_SEVERAL if several else OF_ONE) | {*NOT_ASKED}
    left = (
        replace(
            section,
            folded=section.title not in ("Training", "Serving", "Goal"),
            fields=tuple(
                each
                for each in section.fields
                if not each.name.startswith("search.") and each.name not in elsewhere
            ),
        )
        for section in form_sections(kind)
    )
    return tuple(sorted((each for each in left if each.fields), key=lambda each: each.folded))


def _joined(name: str, parts: list[str]) -> str:
    """Join the values of a repeated parameter, such as of check boxes."""
    if name.removeprefix(AT) == RECOMPUTE and len(parts) > 1:
        return f"{parts[0]} {'+'.join(parts[1:])}" if parts[0] == "selective" else parts[0]
    return ", ".join(dict.fromkeys(parts)) if name in MACHINES else parts[-1]


def _filled(typed: Mapping[str, str]) -> dict[str, str]:
    """Add example values for missing required fields."""
    kind = kind_of(typed)
    question = Question(values=dict(typed))
    left_out = set[str]()
    if question.several or "cluster" in typed or NODE_TYPE in typed:
        left_out |= {GPU, NUM_GPUS}
    if "inference.trace" in typed:
        left_out |= {path for path in EXAMPLES[kind] if path.startswith("inference.")}
    elif any(path.startswith("inference.") for path in typed):
        # Without a limit, the load is the highest that meets the targets.
        left_out.add("inference.concurrency")
    example = EXAMPLES[kind]
    if question.several:
        left_out.add("inference.concurrency")
        if not any(path.startswith(("training.", "inference.")) for path in typed):
            example = example | SEVERAL[kind]
    values = {p: text for p, text in example.items() if p not in left_out} | dict(typed)
    in_yaml = _paths_in_yaml(typed.get(EXTRA, ""))
    return ({"kind": kind} if kind == "inference" else {}) | {
        path: text
        for path, text in values.items()
        if path != "kind" and not any(f"{each}.".startswith(f"{path}.") for each in in_yaml)
    }


def _paths_in_yaml(text: str) -> tuple[str, ...]:
    with contextlib.suppress(InputError):  # The answer reports the error.
        return tuple(dotted(schema.read_yaml(text))) if text else ()
    return ()


def _machines(cluster: dict[str, Any]) -> Any:
    """Split a cluster's comma-separated values. Several machine names become several clusters."""
    cluster = {
        name: _several(f"cluster.{name}", value)
        if f"cluster.{name}" in MACHINES and isinstance(value, str) and "," in value
        else value
        for name, value in cluster.items()
    }
    kinds, gpu = cluster.pop("node_type", None), cluster.get("gpu")
    listed = kinds if isinstance(kinds, list) else [kinds] if kinds else []
    if PRICED not in listed and not isinstance(kinds, list) and not isinstance(gpu, list):
        return cluster | ({} if kinds is None else {"node_type": kinds})
    shared = {name: value for name, value in cluster.items() if name != "gpu"}
    parts = [shared | {"node_type": name} for name in listed if name != PRICED]
    if PRICED in listed:
        parts.insert(0, cluster | {"node_type": PRICED})
    elif gpu:
        parts.insert(0, cluster)
    return parts if len(parts) > 1 else parts[0]


def _several(path: str, text: str) -> list[Any]:
    if path != NUM_GPUS:
        return split_names(text)
    try:
        return [int(part) for part in split_names(text)]
    except ValueError:
        raise InputError(
            f"Expected whole numbers separated by commas, got {text[:100]!r}.", field=path
        ) from None
