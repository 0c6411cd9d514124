"""Names of formats, for help texts that load nothing else."""

IMPORTS = ("megatron-lm", "torchtitan", "deepspeed", "accelerate", "nemo", "gpt-neox", "verl", "nanotron", "vllm", "sglang")
"""Formats that are read."""
EXPORTS = (
    "megatron-lm", "megatron-lm-yaml", "nemo", "torchtitan", "deepspeed", "accelerate", "trl", "axolotl", "llama-factory",
    "nanotron", "verl", "slurm", "kubernetes",
)  # fmt: skip
"""Formats that a training configuration is written in."""
SERVERS = ("vllm", "sglang", "trtllm", "llm-d")
"""Formats that a serving configuration is written in."""
FRAMEWORKS = {"torchtitan": "torch-fsdp", "accelerate": "torch-fsdp", "trl": "torch-fsdp", "axolotl": "torch-fsdp",
              "llama-factory": "torch-fsdp", "nanotron": "nanotron", "nemo": "megatron-core",
              "megatron-lm": "megatron-core", "megatron-lm-yaml": "megatron-core", "slurm": "megatron-core",
              "kubernetes": "megatron-core"}  # fmt: skip
"""The one framework that a format's tool runs; others run what they are given."""
