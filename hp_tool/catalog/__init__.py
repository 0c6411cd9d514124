"""Models, GPUs and servers as data, with their sources. One's own is one more file, never code."""

from hp_tool.catalog.hardware import cluster, gpu, gpus, node_type, node_type_from_mapping, node_types
from hp_tool.catalog.library import Entry, Kind, entries, entry, knows, revision
from hp_tool.catalog.models import checked_model, is_file_name, is_own_file, model, model_from_mapping, models

__all__ = [
    "Entry",
    "Kind",
    "checked_model",
    "cluster",
    "entries",
    "entry",
    "gpu",
    "gpus",
    "is_file_name",
    "is_own_file",
    "knows",
    "model",
    "model_from_mapping",
    "models",
    "node_type",
    "node_type_from_mapping",
    "node_types",
    "revision",
]
