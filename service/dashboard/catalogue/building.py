"""From the catalogue's entries to what its pages show."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any
from urllib.parse import quote, urlencode

from hp_tool.cost.parameters import active_parameters, total_parameters
from hp_tool.domain.hardware import GpuSpec, NodeType
from hp_tool.domain.model import ModelSpec
from hp_tool.queries import schema
from service.dashboard import formats
from service.dashboard.catalogue.contexts import (
    ClusterRow,
    ClustersPage,
    EntryPage,
    GpuRow,
    GpusPage,
    ModelRow,
    ModelsPage,
    NewEntry,
    Section,
)
from service.dashboard.configuration.contexts import Fact

LEARNED_POSITIONS = 2048
"""Rows of a learned position embedding that a model leaves to the workload."""
MODEL_EXAMPLE = """num_hidden_layers: 32
hidden_size: 4096
num_attention_heads: 32
num_key_value_heads: 8
intermediate_size: 14336
vocab_size: 128256
gated_mlp: true
normalization: rmsnorm
tie_word_embeddings: false"""
CLUSTER_EXAMPLE = """gpu: h100-sxm-80gb
gpus_per_node: 8
num_gpus: 64
inter_node_bandwidth_bytes_per_second: 50.0e+9
fabric: 8 x 400 Gb/s InfiniBand
price_per_gpu_hour: 2.5"""


def models_page(specs: Iterable[ModelSpec], *, registered: Collection[str], new: NewEntry | None) -> ModelsPage:
    rows = tuple(_model_row(spec, registered=spec.name in registered) for spec in specs)
    return ModelsPage(title="Models", json_href="/models.json", rows=rows, new=new)


def gpus_page(specs: Iterable[GpuSpec]) -> GpusPage:
    return GpusPage(title="GPUs", json_href="/gpus.json", rows=tuple(map(_gpu_row, specs)))


def clusters_page(nodes: Iterable[NodeType], *, registered: Collection[str], new: NewEntry | None) -> ClustersPage:
    rows = tuple(_cluster_row(node, registered=node.name in registered) for node in nodes)
    return ClustersPage(title="Clusters", json_href="/clusters.json", rows=rows, new=new)


def entry_page(spec: ModelSpec | GpuSpec | NodeType, *, section: Section, removable: bool) -> EntryPage:
    """Every field that says something."""
    known: dict[str, Any] = schema.to_dict(spec)
    source = str(known.pop("source", "") or "")
    known.pop("name", None)
    facts = [Fact(name=_name(name), value=_said(name, value)) for name, value in known.items() if value is not None]
    if isinstance(spec, ModelSpec):
        total = total_parameters(spec, sequence_length=LEARNED_POSITIONS)
        facts.insert(0, Fact(name="parameters", value=formats.billions(total)))
    explore = {"models": "model", "gpus": "gpu"}.get(section)
    href = f"/{section}/{quote(spec.name, safe='')}"
    return EntryPage(
        title=spec.name,
        json_href=f"{href}.json",
        section=section,
        facts=tuple(facts),
        source=source,
        explorer_href=f"/explorer?{urlencode({explore: spec.name})}" if explore else None,
        remove_href=f"{href}/remove" if removable else None,
    )


def _model_row(spec: ModelSpec, *, registered: bool) -> ModelRow:
    return ModelRow(
        name=spec.name,
        href=f"/models/{quote(spec.name, safe='')}",
        parameters=total_parameters(spec, sequence_length=LEARNED_POSITIONS),
        active_parameters=active_parameters(spec, sequence_length=LEARNED_POSITIONS) if spec.num_experts else None,
        num_hidden_layers=spec.num_hidden_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads or spec.num_attention_heads,
        vocab_size=spec.vocab_size,
        num_experts=spec.num_experts,
        registered=registered,
    )


def _gpu_row(spec: GpuSpec) -> GpuRow:
    return GpuRow(
        name=spec.name,
        href=f"/gpus/{quote(spec.name, safe='')}",
        memory_bytes=spec.memory_bytes,
        memory_bandwidth_bytes_per_second=spec.memory_bandwidth_bytes_per_second,
        bf16_flops_per_second=spec.peak_flops_per_second.get("bf16"),
        fp8_flops_per_second=spec.peak_flops_per_second.get("fp8"),
        nvlink_bandwidth_bytes_per_second=spec.nvlink_bandwidth_bytes_per_second,
        network_bandwidth_bytes_per_second=spec.inter_node_bandwidth_bytes_per_second,
        power_w=spec.power_w,
        price_per_hour=spec.price_per_hour,
    )


def _cluster_row(node: NodeType, *, registered: bool) -> ClusterRow:
    return ClusterRow(
        name=node.name,
        href=f"/clusters/{quote(node.name, safe='')}",
        gpu=node.gpu,
        gpus_per_node=node.gpus_per_node,
        num_gpus=node.num_gpus,
        network_bandwidth_bytes_per_second=node.inter_node_bandwidth_bytes_per_second,
        fabric=node.fabric,
        price_per_gpu_hour=node.price_per_gpu_hour,
        registered=registered,
    )


UNITS = ("_bytes_per_second", "_flops_per_second", "_bytes", "_w")


def _name(field: str) -> str:
    """Without the unit, which stands behind the number."""
    unit = next((unit for unit in UNITS if field.endswith(unit)), "")
    return formats.words(field.removesuffix(unit))


def _said(field: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{formats.words(name)} {_said(field, inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(str(inner) for inner in value)
    if not isinstance(value, int | float):
        return str(value)
    if field.endswith("_bytes_per_second"):
        return formats.per_second(value)
    if field.endswith("_flops_per_second"):
        return formats.tflops(value)
    if field.endswith("_bytes"):
        return formats.gib(value)
    return f"{formats.count(value)} W" if field.endswith("_w") else formats.count(value)
