"""Keys of `training` by whether they change the numbers that are trained."""

NUMERICS_KEYS = (
    "global_batch_size",
    "precision",
    "fp8_recipe",
    "parameter_precision",
    "gradient_precision",
    "optimizer_precision",
    "exp_avg_sq_precision",
    "master_precision",
    "expert_precision",
    "dispatch_precision",
    "expert_capacity_factor",
)
"""What changes them: no ranking varies it unless the query lists values."""
FREE_PATHS = ("training.cuda_graphs", "training.cross_entropy", "training.overlap")
"""Paths of what changes none of them: a ranking takes these where they are worth it and the query
leaves them open.
"""
