"""The framework whose constants apply to trainings by a tool's configuration."""

FRAMEWORKS_BY_TOOL = {
    "trainer": "hf-trainer",
    "trainer-deepspeed": "deepspeed",
    "fsdp": "torch-fsdp",
    "torchtitan": "torch-fsdp",
    "torchtune": "torchtune",
    "nemo-automodel": "nemo-automodel",
}
"""Value of `training.framework` for queries read from a tool's files."""
