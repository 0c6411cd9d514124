"""Short names of query keys: arguments, flags, grid columns, and names used by other tools."""

from hp_tool.domain.axes import AXES

COMMON = {
    "model": "model",
    "gpu": "cluster.gpu",
    "num_gpus": "cluster.num_gpus",
    "sequence_length": "training.sequence_length",
    "global_batch_size": "training.global_batch_size",
    "precision": "training.precision",
    "total_tokens": "training.total_tokens",
}
"""Short names of common keys: arguments of the Python API, flags, and columns."""

COLUMNS = {
    **{axis.column: f"parallel.{axis.key}" for axis in AXES if axis.column is not None},
    "gpus_per_node": "cluster.gpus_per_node",
    **COMMON,
}
"""Columns of a grid."""

FOREIGN_NAMES = {
    "gbs": "training.global_batch_size",
    "batch_size": "training.global_batch_size",
    "train_batch_size": "training.global_batch_size",
    "per_device_train_batch_size": "parallel.micro_batch_size",
    "micro_batch": "parallel.micro_batch_size",
    "seq_length": "training.sequence_length",
    "seq_len": "training.sequence_length",
    "max_seq_len": "training.sequence_length",
    "max_length": "training.sequence_length",
    "context_length": "training.sequence_length",
    "dtype": "training.precision",
    "train_tokens": "training.total_tokens",
    "gpus": "cluster.num_gpus",
    "n_gpus": "cluster.num_gpus",
    "ngpus": "cluster.num_gpus",
    "world_size": "cluster.num_gpus",
    "gpu_type": "cluster.gpu",
    "adp": "parallel.attention_data_parallel_size",
    "fsdp": "parallel.zero_stage",
    "zero_level": "parallel.zero_stage",
    "activation_checkpointing": "parallel.recompute",
    "gradient_checkpointing": "parallel.recompute",
    "recomputation": "parallel.recompute",
    "checkpointing": "parallel.recompute",
    "isl": "inference.input_length",
    "osl": "inference.output_length",
    "max_concurrency": "inference.concurrency",
    "qps": "inference.request_rate_per_second",
    "max_runs": "search.budget_runs",
    "num_runs": "search.budget_runs",
    "max_trials": "search.budget_runs",
    "n_trials": "search.budget_runs",
    "ttft": "targets.ttft_s",
    "tpot": "targets.tpot_s",
    "itl": "targets.tpot_s",
}
"""Key names of other tools, for which errors suggest a replacement."""


def path_of_foreign_name(key: str) -> str | None:
    """Return the dotted path of the key that other tools call by this name, ignoring case and
    dashes.
    """
    name = key.lower().replace("-", "_")
    return COLUMNS.get(name) or FOREIGN_NAMES.get(name)
