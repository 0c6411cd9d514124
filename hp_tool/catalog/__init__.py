"""Catalogue of models, GPUs and servers as data files with sources; users add entries as files."""

from hp_tool.catalog.hardware import cluster, gpu, node_type, node_type_from_mapping
from hp_tool.catalog.library import Entry, Kind, entry, knows, names, revision
from hp_tool.catalog.model_checks import checked_model
from hp_tool.catalog.models import (
    is_file_name,
    is_own_file,
    model,
    model_from_mapping,
    parameter_counts,
)

__all__ = [
    "Entry",
    "Kind",
    "checked_model",
    "cluster",
    "entry",
    "gpu",
    "is_file_name",
    "is_own_file",
    "knows",
    "model",
    "model_from_mapping",
    "names",
    "node_type",
    "node_type_from_mapping",
    "parameter_counts",
    "revision",
]
