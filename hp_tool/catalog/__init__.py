"""Catalogue of models, GPUs and servers: data files with their sources. Users can add entries as
files.
"""

from hp_tool.catalog.hardware import cluster, gpu, node_type, node_type_from_mapping
from hp_tool.catalog.library import Entry, Kind, entry, has_entry, names, revision
from hp_tool.catalog.model_checks import check_model
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
    "check_model",
    "cluster",
    "entry",
    "gpu",
    "has_entry",
    "is_file_name",
    "is_own_file",
    "model",
    "model_from_mapping",
    "names",
    "node_type",
    "node_type_from_mapping",
    "parameter_counts",
    "revision",
]
