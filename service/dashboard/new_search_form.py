"""The new search's form: its fields, which the query's schema describes, and their values to and from a query."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import yaml

from hp_tool.domain.frameworks import FRAMEWORKS as FRAMEWORKS
from hp_tool.domain.query import Kind, Query
from hp_tool.errors import InputError
from hp_tool.queries import schema
from hp_tool.queries.schema import branches, declarations
from hp_tool.training.recipes import recipes
from service.dashboard.formats import dotted

Suggested = Literal["models", "gpus", "clusters", "frameworks", "recipes", "trainers"]


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
    hint: str = ""
    """Shown beneath it."""
    default: str = ""

    @property
    def unset(self) -> str:
        """What it says while it is left out."""
        return self.placeholder or self.default or "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled group of fields."""

    title: str
    fields: tuple[Field, ...]
    folded: bool = False
    """Collapsed, because most queries do without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeChoice:
    """A recipe that a query may name."""

    name: str
    description: str


Spec = tuple[str, str] | tuple[str, str, str]
"""Path, label, and an optional placeholder."""

RECIPE = "training.recipe"
RECOMPUTE = "parallel.recompute"
MAX_DIGITS = 10
"""Digits of a number of layers."""
WORK: tuple[Spec, ...] = (("model", "Model", "llama-3-70b"),)
CLUSTER: tuple[Spec, ...] = (
    ("cluster.gpu", "GPU", "h100-sxm-80gb"),
    ("cluster.num_gpus", "GPUs", "64"),
    ("cluster.gpus_per_node", "GPUs per node", "8"),
    ("cluster", "or a registered cluster"),
)
NVLINK: tuple[Spec, ...] = (
    ("cluster.nvlink_domain_size", "GPUs per NVLink domain", "the usual server's"),
    ("cluster.nvlink_segment_gpus", "GPUs per NVLink segment", "automatic"),
)
SOFTWARE: tuple[Spec, ...] = (
    ("training.framework_version", "Framework version", "any"),
    ("training.parameter_precision", "Parameter precision", "framework's own"),
    ("training.gradient_precision", "Gradient precision", "framework's own"),
    ("training.cross_entropy", "Cross-entropy loss", "recipe's or unfused"),
    ("training.attention_kernel", "Attention kernel", "recipe's or framework's own"),
    ("training.activation_func_fp8_input_store", "Activation input in fp8", "with fp8 frozen weights"),
    ("training.gated_product", "Gated MLP's product", "kept"),
    ("training.gradient_reduction", "ZeRO 2 reduces after each", "micro_batch"),
    ("training.cuda_graphs", "CUDA graphs", "recipe's or no"),
    ("training.kernel_fusion", "Fused kernels"),
)
EXPERTS: dict[Kind, tuple[Spec, ...]] = {
    "training": (
        ("training.expert_precision", "Experts' matmuls", "as all matmuls"),
        ("training.dispatch_precision", "Tokens sent to experts", "16 bits"),
        ("training.expert_imbalance", "Expert imbalance"),
        ("training.expert_capacity_factor", "Expert capacity", "no token is dropped"),
        ("training.overlap.expert_parallel", "Tokens travel behind other passes", "recipe's or no"),
    ),
    "inference": (
        ("inference.expert_imbalance", "Expert imbalance", "expected"),
        ("inference.two_batch_overlap", "Two-batch overlap", "where it is faster"),
    ),
}
POOLS: tuple[Spec, ...] = (
    ("inference.disaggregated.prefill_tensor_parallel_size", "Prefill: tensor parallel", "any"),
    ("inference.disaggregated.prefill_expert_parallel_size", "Prefill: expert parallel", "one, or all of the replica"),
    ("inference.disaggregated.prefill_attention_data_parallel_size", "Prefill: attention data parallel", "any"),
    ("inference.disaggregated.decode_tensor_parallel_size", "Decoding: tensor parallel", "any"),
    ("inference.disaggregated.decode_expert_parallel_size", "Decoding: expert parallel", "one, or all of the replica"),
    ("inference.disaggregated.decode_attention_data_parallel_size", "Decoding: attention data parallel", "any"),
)
FINE_TUNING: tuple[Spec, ...] = (
    ("training.task", "Task"),
    ("training.lora.rank", "LoRA rank", "16"),
    ("training.lora.dropout", "LoRA dropout"),
    ("training.frozen_precision", "Frozen weights", "as all parameters"),
)
WORKLOADS: dict[Kind, tuple[Spec, ...]] = {
    "training": (
        ("training.sequence_length", "Sequence length", "8192"),
        ("training.global_batch_size", "Global batch size", "128"),
        ("training.precision", "Precision"),
        ("training.total_tokens", "Total tokens", "15e12"),
        ("training.framework", "Framework", "megatron-core"),
        (RECIPE, "Recipe", "none"),
    ),
    "inference": (
        ("inference.input_length", "Input tokens", "4000"),
        ("inference.output_length", "Output tokens", "1000"),
        ("inference.concurrency", "Concurrent requests", "the most within the targets"),
        ("inference.request_rate_per_second", "Requests per second", "instead"),
        ("inference.think_time_s", "Think time (s)"),
        ("inference.load.arrival", "Load", "closed"),
        ("inference.load.client", "Client", "lengths differ"),
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
        ("parallel.expert_tensor_parallel_size", "Expert tensor parallel", "any"),
        ("parallel.moe_token_dispatcher_type", "Token dispatcher", "any"),
        ("parallel.micro_batch_size", "Micro-batch", "any"),
        ("parallel.sequence_parallel", "Sequence parallel", "any"),
        ("parallel.pipeline_schedule", "Pipeline schedule", "1f1b or interleaved"),
        ("parallel.data_parallel_shard_size", "ZeRO group", "all replicas"),
        ("parallel.context_parallel_communication", "Context exchange", "any"),
        ("parallel.zero_stage", "ZeRO stage", "any (3: FSDP)"),
        ("parallel.recompute", "Recomputation", "any"),
    ),
    "inference": (
        ("parallel.tensor_parallel_size", "Tensor parallel", "any"),
        ("parallel.pipeline_parallel_size", "Pipeline parallel", "any"),
        ("parallel.expert_parallel_size", "Expert parallel", "any"),
        ("parallel.attention_data_parallel_size", "Attention data parallel", "any"),
        ("parallel.redundant_experts", "Redundant experts", "fewest"),
    ),
}
GOALS: dict[Kind, tuple[Spec, ...]] = {
    "training": (
        ("objective", "Objective", "throughput"),
        ("rank_by", "Rank by step time", "expected"),
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
    ("search.run_timeout_s", "Maximum seconds per run", "auto"),
    ("search.queue_timeout_s", "Maximum seconds in the queue", "no limit"),
    ("search.fidelity", "Fidelity"),
    ("search.preflight", "Check the nodes first"),
    ("search.balanced_routing", "Tokens spread evenly over experts", "as expert_imbalance says"),
    ("search.reuse", "Reuse earlier measurements"),
)
BASELINE: dict[Kind, tuple[Spec, ...]] = {
    "training": (
        ("search.baseline.tensor_parallel_size", "Baseline TP", "1"),
        ("search.baseline.pipeline_parallel_size", "Baseline PP", "1"),
        ("search.baseline.virtual_pipeline_parallel_size", "Baseline VPP", "1"),
        ("search.baseline.context_parallel_size", "Baseline CP", "1"),
        ("search.baseline.expert_parallel_size", "Baseline EP", "1"),
        ("search.baseline.micro_batch_size", "Baseline MBS", "1"),
        ("search.baseline.recompute", "Baseline recompute", "none"),
        ("search.baseline.zero_stage", "Baseline ZeRO", "framework's own"),
    ),
    "inference": (
        ("search.baseline.tensor_parallel_size", "Baseline TP", "1"),
        ("search.baseline.max_num_seqs", "Baseline requests at once", "engine's own"),
    ),
}
TRAINER: Spec = ("trainer", "Registered trainer", "the built-in profiler")
SUGGESTED: dict[str, Suggested] = {
    "model": "models",
    "cluster.gpu": "gpus",
    "cluster": "clusters",
    "training.framework": "frameworks",
    RECIPE: "recipes",
    "trainer": "trainers",
}
HINTS = {RECOMPUTE: "In detail: selective layernorm+mlp, full block 4"}
EXTRA = "extra"
"""The form's last field: further fields of the query, as YAML."""


def recipe_choices() -> tuple[RecipeChoice, ...]:
    """All recipes of the catalogue."""
    return tuple(RecipeChoice(name=recipe.name, description=recipe.description) for recipe in recipes())


@cache
def sections(kind: Kind) -> tuple[Section, ...]:
    """Sections of the form for a kind of query."""
    training = kind == "training"
    return (
        _section("Model", WORK),
        _section("Cluster", CLUSTER),
        _section("Training" if training else "Serving", WORKLOADS[kind]),
        _section("Goal", GOALS[kind]),
        _section("Parallelism: fixed or allowed values", AXES[kind], folded=True),
        *((_section("Precision and kernels", SOFTWARE, folded=True),) if training else ()),
        _section("Experts", EXPERTS[kind], folded=True),
        *(() if training else (_section("Pools for prefill and decoding", POOLS, folded=True),)),
        *((_section("Fine-tuning", FINE_TUNING, folded=True),) if training else ()),
        _section("NVLink", NVLINK, folded=True),
        _section("What you run today, to compare with", BASELINE[kind], folded=True),
        _section("Profile runs", (*BUDGET, TRAINER) if training else BUDGET, folded=True),
    )


def _section(title: str, specs: Iterable[Spec], *, folded: bool = False) -> Section:
    return Section(title=title, fields=tuple(map(_field, specs)), folded=folded)


@cache
def fields(kind: Kind) -> dict[str, Field]:
    """Fields of the form by path."""
    return {field.name: field for section in sections(kind) for field in section.fields}


def _field(spec: Spec) -> Field:
    path, label, placeholder = spec if len(spec) == 3 else (*spec, "")
    query = schema.described(Query)
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
        several="oneOf" not in declared and any(each.get("type") == "array" for each in kinds),  # a search runs one training
        text=all(each.get("type") in ("string", "null", "object") for each in kinds),
        help=str(declared.get("description", "")),
        hint=HINTS.get(path, ""),
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
    known, others = fields(kind_of(values)), fields("training" if kind_of(values) == "inference" else "inference")
    filled = {name: _value(known[name], text) for name, text in values.items() if name in known}
    if "cluster" in filled and any(name.startswith("cluster.") for name in filled):
        raise InputError("name a registered cluster or describe one, not both", field="cluster")
    # An address may name any path of a query; fields of the other kind are left over from its tab.
    unlisted = {name: _any_value(name, text) for name, text in values.items() if "." in name and name not in known | others}
    return schema.lay(schema.lay(query, filled), unlisted)


def to_values(query: Mapping[str, Any], known: Mapping[str, Field] | None = None) -> dict[str, str]:
    """The form's values for a query; what its fields cannot hold exactly goes into its YAML. `known`: its fields by path."""
    leaves = dotted({name: value for name, value in query.items() if name != "kind"})
    parallel = query.get("parallel")
    if isinstance(parallel, Mapping) and isinstance(recompute := parallel.get("recompute"), Mapping):  # a value, not a section
        leaves = {path: value for path, value in leaves.items() if not path.startswith(f"{RECOMPUTE}.")} | {
            RECOMPUTE: recompute
        }
    known = fields(kind_of(query)) if known is None else known
    texts = {name: _text(known[name], value) for name, value in leaves.items() if name in known}
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


def _any_value(name: str, text: str) -> Any:
    """The value of a field that the form does not list, as YAML reads it."""
    try:
        return schema.read_yaml(f"value: {text}").get("value")
    except InputError as error:
        raise InputError(error.message, field=name, code=error.code) from None


def _value(field: Field, text: str) -> Any:
    if field.several and "," in text:
        return [_scalar(field, part.strip()) for part in text.split(",") if part.strip()]
    return _scalar(field, text)


def _scalar(field: Field, text: str) -> Any:
    """The text as a number, boolean or recomputation in detail if the field can hold one, else unchanged."""
    if field.text:
        return text
    if field.name == RECOMPUTE:
        return recompute_value(text)
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _text(field: Field, value: Any) -> str | None:
    """A value as the field shows it; None if it cannot say exactly this."""
    text = ", ".join(map(_word, value)) if isinstance(value, list | tuple) else _word(value)
    if field.options and not field.several and text not in field.options:
        return None
    # An input has one line without outer spaces; empty, it leaves its field out.
    return text if text.strip() == text and text and text.isprintable() and _value(field, text) == value else None


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return recompute_text(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def recompute_text(value: Mapping[str, Any]) -> str:
    """A recomputation's mapping in one line, as `recompute_value` reads it."""
    parts = (part for part in value.values() if part is not None)
    return " ".join("+".join(map(str, part)) if isinstance(part, list) else str(part) for part in parts)


def recompute_value(text: str) -> str | dict[str, Any]:
    """`selective layernorm+mlp` and `full block 4` as the mappings that a query writes; one word as it is."""
    words = text.split()
    if len(words) < 2:
        return text
    value: dict[str, Any] = {"granularity": words[0]}
    for word in words[1:]:
        if word.isdecimal() and len(word) < MAX_DIGITS:
            value["num_layers"] = int(word)
        elif word in ("uniform", "block"):
            value["method"] = word
        else:
            value["modules"] = word.split("+")
    return value
