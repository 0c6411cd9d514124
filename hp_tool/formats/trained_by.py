"""The framework whose constants answer for what a tool's configuration trains by."""

RUNS = {
    "trainer": "hf-trainer",
    "trainer-deepspeed": "deepspeed",
    "fsdp": "torch-fsdp",
    "torchtitan": "torch-fsdp",
    "torchtune": "torchtune",
    "nemo-automodel": "nemo-automodel",
}
"""By tool: `training.framework` of the queries that its files are read into."""
