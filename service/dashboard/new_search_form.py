"""The new search's form: its fields, which the query's schema describes, and their values to and from a query."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import yaml

from hp_tool.domain.query import Kind, Query
from hp_tool.errors import InputError
from hp_tool.queries import schema
from hp_tool.queries.schema import branches, declarations
from service.dashboard.formats import dotted

Suggested = Literal["models", "gpus", "clusters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of the form."""

    name: str
    """Its dotted path in a query, which errors name too."""
    label: str
    suggested: Suggested | None = None
    """Kind of names to suggest."""
    placeholder: str = ""
    options: tuple[str, ...] = ()
    """All its values, if the schema lists them."""
    minimum: float | None = None
    maximum: float | None = None
    step: str = "any"
    """1 for a whole number."""
    several: bool = False
    """It takes several allowed values, separated by commas."""
    text: bool = False
    """It is text even if it looks like a number."""
    help: str = ""
    default: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled group of fields."""

    title: str
    fields: tuple[Field, ...]
    folded: bool = False
    """Collapsed, because most queries do without it."""


Spec = tuple[str, str] | tuple[str, str, str]
"""Path, label, and an optional placeholder."""

WORK: tuple[Spec, ...] = (("model", "Model", "llama-3-70b"),)
CLUSTER: tuple[Spec, ...] = (
    ("cluster.gpu", "GPU", "h100-sxm-80gb"),
    ("cluster.num_gpus", "GPUs", "64"),
    ("cluster.gpus_per_node", "GPUs per node", "8"),
    ("cluster", "or a registered cluster"),
)
WORKLOADS: dict[Kind, tuple[Spec, ...]] = {
    "training": (
        ("training.sequence_length", "Sequence length", "8192"),
        ("training.global_batch_size", "Global batch size", "128"),
        ("training.precision", "Precision"),
        ("training.total_tokens", "Total tokens", "15e12"),
        ("training.framework", "Framework", "megatron-core"),
    ),
    "inference": (
        ("inference.input_length", "Input tokens", "4000"),
        ("inference.output_length", "Output tokens", "1000"),
        ("inference.concurrency", "Concurrent requests", "64"),
        ("inference.precision", "Precision"),
        ("inference.engine", "Engine", "vllm"),
    ),
}
AXES: dict[Kind, tuple[Spec, ...]] = {
    "training": (
        ("parallel.tensor_parallel_size", "Tensor parallel", "any"),
        ("parallel.pipeline_parallel_size", "Pipeline parallel", "any"),
        ("parallel.virtual_pipeline_parallel_size", "Chunks per rank", "any"),
        ("parallel.context_parallel_size", "Context parallel", "any"),
        ("parallel.expert_parallel_size", "Expert parallel", "any"),
        ("parallel.micro_batch_size", "Micro-batch", "any"),
        ("parallel.sequence_parallel", "Sequence parallel", "any"),
        ("parallel.recompute", "Recomputation", "any"),
        ("parallel.zero_stage", "ZeRO stage", "any"),
    ),
    "inference": (
        ("parallel.tensor_parallel_size", "Tensor parallel", "any"),
        ("parallel.pipeline_parallel_size", "Pipeline parallel", "any"),
        ("parallel.expert_parallel_size", "Expert parallel", "any"),
        ("parallel.attention_data_parallel_size", "Attention data parallel", "any"),
    ),
}
GOALS: dict[Kind, tuple[Spec, ...]] = {
    "training": (
        ("objective", "Objective", "throughput"),
        ("constraints.max_days", "Maximum days"),
        ("constraints.max_cost", "Maximum cost ($)"),
        ("constraints.memory_headroom_fraction", "Free memory fraction", "0.05"),
    ),
    "inference": (
        ("objective", "Objective", "throughput_per_gpu"),
        ("targets.ttft_s", "Maximum TTFT (s)", "1.0"),
        ("targets.tpot_s", "Maximum TPOT (s)", "0.03"),
        ("constraints.memory_headroom_fraction", "Free memory fraction", "0.05"),
    ),
}
BUDGET: tuple[Spec, ...] = (
    ("search.launcher", "Launcher"),
    ("search.budget_runs", "Maximum profile runs", "8"),
    ("search.budget_gpu_seconds", "Maximum GPU-seconds"),
    ("search.run_timeout_s", "Maximum seconds per run", "300"),
    ("search.fidelity", "Fidelity"),
    ("search.reuse", "Reuse earlier measurements"),
)
SUGGESTED: dict[str, Suggested] = {"model": "models", "cluster.gpu": "gpus", "cluster": "clusters"}
EXTRA = "extra"
"""The form's last field: further fields of the query, as YAML."""


@cache
def sections(kind: Kind) -> tuple[Section, ...]:
    """Sections of the form for a kind of query."""
    shown = (
        ("Model", WORK, False),
        ("Cluster", CLUSTER, False),
        ("Training" if kind == "training" else "Serving", WORKLOADS[kind], False),
        ("Goal", GOALS[kind], False),
        ("Parallelism: fixed or allowed values", AXES[kind], True),
        ("Profile runs", BUDGET, True),
    )
    return tuple(Section(title=title, fields=tuple(map(_field, specs)), folded=folded) for title, specs, folded in shown)


@cache
def fields(kind: Kind) -> dict[str, Field]:
    """Fields of the form by path."""
    return {field.name: field for section in sections(kind) for field in section.fields}


def _field(spec: Spec) -> Field:
    path, label, placeholder = spec if len(spec) == 3 else (*spec, "")
    query = schema.adapter(Query)
    (declared,) = declarations(query, path.split("."))
    kinds = branches(query, declared)
    number = next((each for each in kinds if "maximum" in each), {})
    options = next((tuple(map(str, each["enum"])) for each in kinds if "enum" in each), ())
    if not options and any(each.get("type") == "boolean" for each in kinds):
        options = ("true", "false")
    default = declared.get("default")
    return Field(
        name=path,
        label=label,
        suggested=SUGGESTED.get(path),
        placeholder=placeholder,
        options=options,
        minimum=number.get("minimum"),
        maximum=number.get("maximum"),
        step="1" if number.get("type") == "integer" else "any",
        several=any(each.get("type") == "array" for each in kinds),
        text=all(each.get("type") in ("string", "null", "object") for each in kinds),
        help=str(declared.get("description", "")),
        default="" if default is None else str(default).lower() if isinstance(default, bool) else str(default),
    )


def kind_of(values: Mapping[str, Any]) -> Kind:
    """Kind of query that a form or a query's mapping describes."""
    return "inference" if values.get("kind") == "inference" else "training"


def to_query(values: Mapping[str, str]) -> dict[str, Any]:
    """The form's query, not yet validated. Raises InputError for invalid YAML."""
    query: dict[str, Any] = {"kind": kind_of(values)}
    if EXTRA in values:
        query |= _extra(values[EXTRA])
    known = fields(kind_of(values))
    filled = {name: _value(known[name], text) for name, text in values.items() if name in known}
    if "cluster" in filled and any(name.startswith("cluster.") for name in filled):
        raise InputError("name a registered cluster or describe one, not both", field="cluster")
    return schema.lay(query, filled)


def to_values(query: Mapping[str, Any]) -> dict[str, str]:
    """The form's values for a query; what its fields cannot hold goes into its YAML."""
    leaves = dotted({name: value for name, value in query.items() if name != "kind"})
    texts = {name: _text(field, leaves.get(name)) for name, field in fields(kind_of(query)).items()}
    values = {"kind": kind_of(query), **{name: text for name, text in texts.items() if text is not None}}
    if rest := schema.lay({}, {path: value for path, value in leaves.items() if path not in values}):
        values[EXTRA] = yaml.safe_dump(rest, sort_keys=False, allow_unicode=True)
    return values


def _extra(text: str) -> dict[str, Any]:
    try:
        data = schema.read_yaml(text)
    except InputError as error:
        raise InputError(error.message, field=EXTRA, code=error.code) from None
    if not all(isinstance(name, str) for name in data):
        raise InputError("further fields are `name: value` lines of a query", field=EXTRA, code="syntax")
    return dict(data)


def _value(field: Field, text: str) -> Any:
    if field.several and "," in text:
        return [_scalar(field, part.strip()) for part in text.split(",") if part.strip()]
    return _scalar(field, text)


def _scalar(field: Field, text: str) -> Any:
    """The text as a number or boolean if the field can hold one, else unchanged."""
    if field.text:
        return text
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _text(field: Field, value: Any) -> str | None:
    """A value as the field shows it; None if it cannot."""
    if isinstance(value, list | tuple):
        parts = [_text(field, each) for each in value]
        return ", ".join(part for part in parts if part is not None) if field.several and value and None not in parts else None
    if value is None or isinstance(value, dict):
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)
