"""The explorer's controls: their values, which are its address, and the options of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal

from fastapi import Depends, Request
from fastapi import Query as QueryParameter

from hp_tool.domain.axes import AXES as LAYOUT_AXES
from hp_tool.domain.frameworks import framework_facts
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, RecomputeModule
from hp_tool.domain.workload import AttentionKind, FrozenPrecision
from hp_tool.errors import InputError
from hp_tool.questions import schema
from hp_tool.questions.configuration import SEARCH_KEYS, Configuration
from hp_tool.questions.form_fields import RECIPE, Field, Section, form_fields, form_sections
from service.dashboard.formats import dotted
from service.dashboard.new_search_form import (
    EXTRA,
    recompute_text,
    recompute_value,
    to_query,
    to_values,
)
from service.dashboard.page import BLANK_IS_NONE, address, read_form

MAX_SIZE = 64
"""Largest tensor, pipeline and context parallel size offered; the address accepts any."""
MAX_CHUNKS = 16
LENGTHS = tuple(1024 * 2**k for k in range(11))
RECOMPUTATION = {"none": "none", "selective": "selective", "full": "full"}
OTHER_RECOMPUTATION = {
    "torch-fsdp": {"none": "none", "per_op": "per operator", "per_layer": "per layer"},
    "nanotron": {"none": "none", "full": "full"},
}
SWITCH = {"off": "off", "on": "on"}
ZERO = ("nothing", "optimizer", "and gradients", "and weights (FSDP)")

Name = Annotated[str, QueryParameter(max_length=100)]
Count = Annotated[int, QueryParameter(ge=1, le=1 << 20)]
Size = Annotated[int | None, QueryParameter(ge=1, le=1 << 20)]

WORKLOAD = {
    "model": "model",
    "gpu": "cluster.gpu",
    "num_gpus": "cluster.num_gpus",
    "sequence_length": "training.sequence_length",
    "global_batch_size": "training.global_batch_size",
    "precision": "training.precision",
    "attention": "training.attention",
}
"""Controls of the workload, and the paths of a query that they set."""
LORA = {"lora_rank": "training.lora.rank", "frozen_precision": "training.frozen_precision"}
AXES = {axis.column: axis.key for axis in LAYOUT_AXES if axis.explored and axis.column}
"""Controls that are an axis of a configuration."""
CHOSEN_TOO = (
    "parallel.context_parallel_communication",
    "parallel.hierarchical_context_parallel_sizes",
    "parallel.moe_token_dispatcher_type",
    "parallel.data_parallel_shard_size",
    "parallel.pipeline_schedule",
)
"""Fields without a control that a ranking chooses if they are open, and that a configuration's
details include.
"""
SET_ELSEWHERE = (
    *(
        "kind",
        "objective",
        "trainer",
        *SEARCH_KEYS,
        "parallel.data_parallel_size",
        "parallel.sequence_parallel",
    ),
    *(*WORKLOAD.values(), *(f"parallel.{axis}" for axis in AXES.values())),
)
"""Paths of a query that its details omit: controls set them, or they do not apply here."""
CONTROLLED = (*SET_ELSEWHERE, *LORA.values(), RECIPE, "training.task", "parallel.recompute")
"""Fields of the form that have a control."""


@cache
def groups() -> tuple[Section, ...]:
    """Return fields of a query apart from the controls: those of the form of a new search."""
    tuning = "Fine-tuning"  # beside the controls of LoRA, which come first
    ordered = sorted(form_sections("training"), key=lambda section: section.title != tuning)
    left = (
        replace(
            section,
            folded=True,
            fields=tuple(
                field
                for field in section.fields
                if field.name.startswith(("training.", "parallel.", "cluster."))
                and field.name not in CONTROLLED
            ),
        )
        for section in ordered
    )
    return tuple(section for section in left if section.fields)


def detail_fields() -> dict[str, Field]:
    """Return the fields of all groups by path, and the recipe."""
    return {RECIPE: form_fields("training")[RECIPE]} | {
        field.name: field for group in groups() for field in group.fields
    }


def read_details(request: Request) -> dict[str, str]:
    """Return fields of the groups from the address; further paths of a query go into its YAML."""
    values = {
        name: text
        for name, text in read_form(request.url.query).items()
        if "." in name or name == EXTRA
    }
    try:
        return _details(to_query({"kind": "training", **values}))
    except InputError:
        return values  # the page shows the error


def _details(query: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: text
        for name, text in to_values(query, known=detail_fields()).items()
        if name != "kind"
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values of the controls, under their names in the address."""

    model: Name = "llama-3-70b"
    gpu: Name = "h100-sxm-80gb"
    num_gpus: Count = 64
    sequence_length: Annotated[int, QueryParameter(ge=1, le=1 << 24)] = 8192
    global_batch_size: Count = 512
    precision: Annotated[str, QueryParameter(max_length=20)] = "bf16"
    attention: AttentionKind = "flash"
    lora_rank: Annotated[int, QueryParameter(ge=0, le=65_536)] = 0
    """0: all weights are trained."""
    frozen_precision: Annotated[FrozenPrecision | None, QueryParameter(), BLANK_IS_NONE] = None
    """Applies only with a lora_rank; None for the precision of all parameters."""
    tp: Size = None
    """Here and below, None means the value of the fastest configuration."""
    pp: Size = None
    vpp: Size = None
    cp: Size = None
    ep: Size = None
    etp: Size = None
    mbs: Size = None
    recompute: Annotated[str | None, QueryParameter(max_length=200), BLANK_IS_NONE] = None
    """As in the form of a new search: selective, or full block 4."""
    modules: Annotated[tuple[RecomputeModule, ...], QueryParameter()] = ()
    """Modules if recompute is selective; none for core_attn."""
    sp: Literal["on", "off"] | None = None
    zero: Annotated[int | None, QueryParameter(ge=0, le=3)] = None
    details: Annotated[dict[str, str], Depends(read_details)] = field(default_factory=dict)
    """Further fields of the query by path, and its YAML."""

    def workload(self) -> dict[str, Any]:
        """Return the mapping of a query without the configuration.

        Raises:
            InputError: A value is invalid.
        """
        paths = WORKLOAD | (LORA if self.lora_rank else {})
        values = {
            path: value
            for name, path in paths.items()
            if (value := getattr(self, name)) is not None
        }
        query = to_query({"kind": "training", **self.details})
        if "objective" in query:
            raise InputError("the explorer ranks by throughput; leave objective out", field=EXTRA)
        for path in values:
            if any(f"{leaf}.".startswith(f"{path}.") for leaf in dotted(query)):
                raise InputError(
                    f"{path} has a control; leave it out of the further fields", field=EXTRA
                )
        return schema.set_paths(
            query, values | ({"training.task": "lora"} if self.lora_rank else {})
        )

    def parallel(self) -> dict[str, Any]:
        """Return the mapping of the configuration, without the values that are None."""
        values = {axis: getattr(self, name) for name, axis in AXES.items()}
        values["sequence_parallel"] = None if self.sp is None else self.sp == "on"
        values["recompute"] = None if self.recompute is None else recompute_value(self.recompute)
        if self.recompute == "selective" and self.modules:
            values["recompute"] = {"granularity": "selective", "modules": list(self.modules)}
        if (
            self.pp == 1
        ):  # without a pipeline there is nothing to interleave, regardless of the control
            values["virtual_pipeline_parallel_size"] = None
        return {name: value for name, value in values.items() if value is not None}

    def at(self, configuration: Configuration) -> Settings:
        """Return these settings with the controls at the configuration, and a ranking's other
        chosen values.
        """
        config = configuration.parallel
        assert isinstance(config, ParallelConfig)  # the explorer's queries train
        if isinstance(config.recompute, str):
            recompute: str = config.recompute
            modules: tuple[RecomputeModule, ...] = ()
        else:
            modules = config.recompute.modules or ()
            recompute = "selective" if modules else recompute_text(schema.to_dict(config.recompute))
        axes = {name: getattr(config, axis) for name, axis in AXES.items()}
        details = {
            path: one
            for path, text in self.details.items()
            if (one := _one_value(path, text, config)) is not None
        }
        chosen = {path: getattr(config, path.removeprefix("parallel.")) for path in CHOSEN_TOO}
        if any(chosen.values()) or configuration.set:
            kept = configuration.set | {path: value for path, value in chosen.items() if value}
            details = _details(schema.set_paths(to_query({"kind": "training", **details}), kept))
        sp: Literal["on", "off"] = "on" if config.sequence_parallel else "off"
        return replace(self, **axes, sp=sp, recompute=recompute, modules=modules, details=details)

    @property
    def href(self) -> str:
        """Return the explorer's page at these settings."""
        controls = asdict(self)
        return address("/explorer", controls | controls.pop("details"))


def _one_value(path: str, text: str, config: ParallelConfig) -> str | None:
    """Return the configuration's value of an axis for which a detail lists several; other details
    are unchanged.
    """
    known = detail_fields().get(path)
    if known is None or not known.several or "," not in text:
        return text
    value = getattr(config, path.removeprefix("parallel."))
    return None if value is None else str(value)


def explorer_href(configuration: Configuration) -> str | None:
    """Return the explorer's address at this configuration.

    None if its controls cannot express the query's model or cluster.
    """
    query, config = configuration.query, configuration.parallel
    assert isinstance(config, ParallelConfig)  # the explorer's queries train
    leaves = dotted(
        schema.query_mapping(replace(query, parallel=replace(query.parallel, recompute=None)))
    )
    if any(
        not isinstance(leaves.get(WORKLOAD[name]), str | int)
        for name in ("model", "gpu", "num_gpus")
    ):
        return None
    controls, covered = WORKLOAD, SET_ELSEWHERE
    if LORA["lora_rank"] in leaves:  # else a recipe may set it
        controls, covered = WORKLOAD | LORA, (*SET_ELSEWHERE, *LORA.values(), "training.task")
    values = {name: leaves[path] for name, path in controls.items() if path in leaves}
    if config.data_parallel_shard_size == 0:  # all replicas, as without it
        covered += ("parallel.data_parallel_shard_size",)
    rest = {
        path: value
        for path, value in leaves.items()
        if not any(f"{path}.".startswith(f"{each}.") for each in covered)
    }
    return Settings(**values, details=_details(schema.set_paths({}, rest))).at(configuration).href


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One value of a control."""

    value: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A choice; ordered options are drawn as a slider."""

    name: str
    label: str
    value: str
    options: tuple[Option, ...]
    slider: bool
    help: str = ""


def controls(
    settings: Settings, *, model: ModelSpec, framework: str, config: ParallelConfig
) -> tuple[Control, ...]:
    """Return a control for each axis, set to its value in `config`, at `settings`."""
    n, c = settings.num_gpus, config
    recomputation = OTHER_RECOMPUTATION.get(framework, RECOMPUTATION)
    recompute = str(settings.recompute)
    if recompute == "full" and "per_layer" in recomputation:
        recompute = "per_layer"  # FSDP's name of what a ranking calls full
    zero = {
        str(stage): f"{stage}, {ZERO[stage]}"
        for stage in sorted({*framework_facts(framework).zero_stages, c.zero_stage})
    }
    layers = model.num_hidden_layers
    sizes = [size for size in powers(MAX_SIZE) if size <= n]
    stages = [size for size in _divisors(layers) if size <= min(n, MAX_SIZE)]
    layers_per_rank = (
        layers // c.pipeline_parallel_size if layers % c.pipeline_parallel_size == 0 else layers
    )
    chunks = [size for size in _divisors(layers_per_rank) if size <= MAX_CHUNKS]
    heads = [size for size in sizes if size <= model.num_attention_heads]
    axes = [
        numbers(
            "sequence_length", "Sequence length", settings.sequence_length, LENGTHS, help="tokens"
        ),
        numbers("tp", "Tensor parallel (TP)", c.tensor_parallel_size, heads),
        numbers("pp", "Pipeline parallel (PP)", c.pipeline_parallel_size, stages),
        numbers("vpp", "Model chunks per rank", c.virtual_pipeline_parallel_size, chunks),
        numbers("cp", "Context parallel (CP)", c.context_parallel_size, sizes),
    ]
    if model.num_experts:
        experts = [size for size in _divisors(model.num_experts) if size <= n]
        axes.append(numbers("ep", "Expert parallel (EP)", c.expert_parallel_size, experts))
        axes.append(
            numbers("etp", "Expert tensor parallel (ETP)", c.expert_tensor_parallel_size, sizes)
        )
    return (
        *axes,
        numbers("mbs", "Micro-batch", c.micro_batch_size, powers(16), help="sequences"),
        _choice(
            "recompute",
            "Recomputation",
            recompute,
            {**recomputation, recompute: recomputation.get(recompute, recompute)},
        ),
        _choice(
            "sp",
            "Sequence parallel (SP)",
            "on" if c.sequence_parallel else "off",
            SWITCH,
            slider=False,
        ),
        _choice("zero", "ZeRO stage", str(c.zero_stage), zero, slider=False),
    )


def modules(model: ModelSpec, *, framework: str) -> tuple[RecomputeModule, ...]:
    """Return the modules that selective recomputation may name in this model."""
    if framework != "megatron-core":
        return ()
    present: dict[RecomputeModule, bool] = {
        "core_attn": True,
        "layernorm": True,
        "mlp": model.num_hidden_layers > model.moe_layers,
        "moe": model.num_experts is not None,
        "moe_act": model.num_experts is not None,
        "shared_experts": model.num_shared_experts > 0,
        "mla_up_proj": model.kv_lora_rank is not None,
    }
    return tuple(name for name, there in present.items() if there)


def numbers(name: str, label: str, value: int, known: Iterable[int], *, help: str = "") -> Control:
    """Return a slider over these numbers and the value."""
    return _choice(
        name,
        label,
        str(value),
        {str(number): f"{number:,}" for number in sorted({*known, value})},
        help=help,
    )


def _choice(
    name: str,
    label: str,
    value: str,
    labels: dict[str, str],
    *,
    slider: bool = True,
    help: str = "",
) -> Control:
    options = tuple(
        Option(value=option, label=option_label) for option, option_label in labels.items()
    )
    return Control(name=name, label=label, value=value, options=options, slider=slider, help=help)


def powers(largest: int) -> list[int]:
    """Return the powers of two up to `largest`."""
    return [2**k for k in range(largest.bit_length())]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
