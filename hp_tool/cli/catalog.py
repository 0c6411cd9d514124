"""`hp-tool models|gpus|clusters|recipes|trainers|fields [NAME]`: list the names that a query may
use.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hp_tool.domain.units import format_gib

if TYPE_CHECKING:
    from hp_tool.catalog import Kind
    from hp_tool.cluster.trainers.command import RegisteredTrainer
    from hp_tool.domain.hardware import GpuSpec, NodeType
    from hp_tool.domain.model import ModelSpec
    from hp_tool.domain.recipe import Recipe

    Spec = ModelSpec | GpuSpec | NodeType | Recipe | RegisteredTrainer

NameArgument = Annotated[str | None, typer.Argument(help="Name or alias. Default: list all.")]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object. For a single name, the object is a valid catalogue entry.",
    ),
]

_ALWAYS_SHOWN = {"architecture", "tie_word_embeddings", "gated_mlp", "normalization"}


def models(name: NameArgument = None, as_json: JsonOption = False) -> None:
    """List the models of the catalogue, or show one model by name, alias or file."""
    from hp_tool import catalog
    from hp_tool.domain.query import OwnFile

    specs = [catalog.model(each) for each in ([OwnFile(name)] if name else catalog.names("models"))]
    heads = (
        "model",
        "parameters",
        "active",
        "layers",
        "hidden",
        "heads",
        "KV heads",
        "experts",
        "MLP",
        "vocabulary",
    )
    _print_entries(
        specs,
        single=name is not None,
        as_json=as_json,
        kind="models",
        heads=heads,
        rows=map(_model_row, specs),
    )


def gpus(name: NameArgument = None, as_json: JsonOption = False) -> None:
    """List the GPUs of the catalogue, or show one GPU with its source."""
    from hp_tool import catalog

    specs = [catalog.gpu(each) for each in ([name] if name else catalog.names("gpus"))]
    heads = (
        "gpu",
        "memory",
        "GB/s",
        "bf16 TFLOP/s",
        "fp8 TFLOP/s",
        "NVLink GB/s",
        "network GB/s",
        "$/h",
        "lowest $/h",
        "tune",
    )
    _print_entries(
        specs,
        single=name is not None,
        as_json=as_json,
        kind="gpus",
        heads=heads,
        rows=map(_gpu_row, specs),
    )


def clusters(name: NameArgument = None, as_json: JsonOption = False) -> None:
    """List servers, cloud instances and registered clusters, or show one with its source."""
    from hp_tool import catalog

    specs = [catalog.node_type(each) for each in ([name] if name else catalog.names("clusters"))]
    heads = (
        "cluster",
        "gpu",
        "GPUs per node",
        "GPUs",
        "network GB/s per GPU",
        "$/GPU-hour",
        "fabric",
    )
    _print_entries(
        specs,
        single=name is not None,
        as_json=as_json,
        kind="clusters",
        heads=heads,
        rows=map(_cluster_row, specs),
    )


def recipes(name: NameArgument = None, as_json: JsonOption = False) -> None:
    """List the recipes for training.recipe, or show the settings of one recipe and the trainings
    to which they apply.
    """
    from hp_tool.questions.training.recipes import get_recipe, list_recipes

    shown = [get_recipe(name, field="name")] if name else list_recipes()
    if name is None or as_json:
        _print_entries(
            shown,
            single=name is not None,
            as_json=as_json,
            kind="recipes",
            heads=("recipe", "description"),
            rows=((each.name, each.description) for each in shown),
        )
        return
    typer.echo(
        f"{shown[0].description}\nsource: {shown[0].source}\nLater rows override earlier "
        f"rows, and the query "
        "overrides the recipe."
    )
    _print_table(
        ("for", "sets"),
        [(rule.conditions or "every training", rule.settings) for rule in shown[0].rules],
        text=True,
    )


def trainers(name: NameArgument = None, as_json: JsonOption = False) -> None:
    """List the registered training commands (`trainer` of a search), or show one command."""
    from hp_tool.cluster.trainers.command import registered_trainer, registered_trainers

    if name is None:
        known = registered_trainers()
        rows = (
            (
                each.name,
                each.reader,
                each.launch,
                "any" if each.axes is None else ", ".join(each.axes),
                ", ".join(each.reducible),
            )
            for each in known
        )
        heads = ("trainer", "reader", "launch", "axes", "reducible")
        _print_entries(
            known, single=False, as_json=as_json, kind="trainers", heads=heads, rows=rows
        )
        return
    shown = dataclasses.asdict(registered_trainer(name, field="name"))
    if as_json:
        typer.echo(json.dumps(shown))
    else:
        _print_table(
            ("field", "value"),
            [(key, str(value)) for key, value in shown.items() if value],
            text=True,
        )


def _model_row(spec: ModelSpec) -> Sequence[str]:
    from hp_tool import catalog

    experts = f"{spec.num_experts}, top {spec.num_experts_per_tok}" if spec.num_experts else ""
    total, active = (f"{count / 1e9:.4g} B" for count in catalog.parameter_counts(spec).values())
    sizes = map(
        str, (spec.num_hidden_layers, spec.hidden_size, spec.num_attention_heads, spec.kv_heads)
    )
    return (spec.name, total, active, *sizes, experts, str(spec.ffn_size), str(spec.vocab_size))


def _gpu_row(spec: GpuSpec) -> Sequence[str]:
    from hp_tool.catalog.prices import lowest_offers

    rates, lowest = spec.peak_flops_per_second, lowest_offers().get(spec.name)
    return (
        spec.name,
        format_gib(spec.memory_bytes),
        _with_unit(spec.memory_bandwidth_bytes_per_second, 1e9),
        _with_unit(rates.get("bf16"), 1e12),
        _with_unit(rates.get("fp8"), 1e12),
        _with_unit(spec.nvlink_bandwidth_bytes_per_second, 1e9),
        _with_unit(spec.inter_node_bandwidth_bytes_per_second, 1e9),
        _with_unit(spec.price_per_hour, 1.0),
        _with_unit(lowest.on_demand if lowest else None, 1.0),
        "predict-only" if spec.predict_only else "",
    )


def _cluster_row(spec: NodeType) -> Sequence[str]:
    return (
        spec.name,
        spec.gpu,
        str(spec.gpus_per_node),
        str(spec.num_gpus or ""),
        _with_unit(spec.inter_node_bandwidth_bytes_per_second, 1e9),
        _with_unit(spec.price_per_gpu_hour, 1.0),
        spec.fabric,
    )


def _with_unit(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:.4g}"


def fields(
    words: Annotated[
        str | None,
        typer.Argument(
            help="Words to find in paths, labels and descriptions. Default: list all fields."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List fields of a query with path, label, values and default."""
    from hp_tool.questions.form_fields import form_sections

    known = {
        field.name: field
        for kind in ("training", "inference")
        for form_section in form_sections(kind)
        for field in form_section.fields
    }
    wanted = (words or "").casefold().split()
    rows = [
        each
        for each in known.values()
        if all(word in f"{each.name} {each.label} {each.help}".casefold() for word in wanted)
    ]
    if as_json:
        typer.echo(json.dumps({"items": [dataclasses.asdict(row) for row in rows]}))
    else:
        shown = [(row.name, row.label, row.takes, row.left_out) for row in rows]
        _print_table(("field", "label", "values", "left out"), shown, text=True)


def _print_entries(
    specs: Sequence[Spec],
    *,
    single: bool,
    as_json: bool,
    kind: Kind,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> None:
    if as_json:
        items = [dataclasses.asdict(spec) | _parameter_counts(spec) for spec in specs]
        typer.echo(json.dumps(items[0] if single else {"items": items}))
    elif single:
        _print_table(
            ("field", "value"),
            [(key, str(value)) for key, value in _entry_fields(specs[0], kind).items()],
            text=True,
        )
    else:
        _print_table(heads, rows, text=kind in ("recipes", "trainers"))


def _entry_fields(spec: Spec, kind: Kind) -> dict[str, object]:
    """Return the fields that a specification sets, with the aliases and the source of its catalogue
    entry.

    For a model, these are the fields that differ from their defaults, and the parameter counts.
    """
    from hp_tool import catalog
    from hp_tool.domain.model import ModelSpec
    from hp_tool.errors import NotFoundError

    shown = {key: value for key, value in dataclasses.asdict(spec).items() if value is not None}
    if isinstance(spec, ModelSpec):
        usual = {
            field.name: field.default
            for field in dataclasses.fields(spec)
            if field.name not in _ALWAYS_SHOWN
        }
        shown = {
            key: value for key, value in shown.items() if key not in usual or value != usual[key]
        }
        if spec.blocks is not None:
            shown["blocks"] = "; ".join(map(str, spec.blocks))
        total, active = _parameter_counts(spec).values()
        shown["parameters"] = f"{total:,}"
        if spec.num_experts:
            shown["active parameters"] = f"{active:,}"
    try:
        entry = catalog.entry(kind, spec.name)
    except NotFoundError:
        return shown
    metadata = {
        "aliases": ", ".join(entry.aliases),
        "published parameters": entry.parameters,
        "source": entry.source,
    }
    metadata |= {
        f"checkpoints in {kind}": ", ".join(ids) for kind, ids in entry.checkpoints.items()
    }
    return shown | {key: value for key, value in metadata.items() if value}


def _parameter_counts(spec: Spec) -> dict[str, int]:
    from hp_tool import catalog
    from hp_tool.domain.model import ModelSpec

    return catalog.parameter_counts(spec) if isinstance(spec, ModelSpec) else {}


def _print_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, text: bool = False
) -> None:
    """Print a table. With `text`, all columns contain text that wraps."""
    from hp_tool.cli.layout import make_console, print_table

    print_table(make_console(), heads, rows, left=len(heads) if text else 1, wrap=text)
