"""What a query may name: models, GPUs, and clusters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from fastapi import APIRouter

from hp_tool import catalog
from hp_tool.domain.hardware import GpuSpec, NodeType
from hp_tool.domain.model import ModelSpec

router = APIRouter(tags=["catalogue"])

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(Generic[T]):
    """Catalogue entries by name."""

    items: list[T]


@router.get("/models")
def models() -> Listing[ModelSpec]:
    """Every model of the catalogue, with its shape."""
    return Listing(items=[catalog.model(name, allow_files=False) for name in catalog.models()])


@router.get("/gpus")
def gpus() -> Listing[GpuSpec]:
    """Every GPU of the catalogue, with its datasheet."""
    return Listing(items=[catalog.gpu(name) for name in catalog.gpus()])


@router.get("/clusters")
def clusters() -> Listing[NodeType]:
    """Servers, cloud instances and registered clusters, with fabric and price."""
    return Listing(items=[catalog.node_type(name) for name in catalog.node_types()])
