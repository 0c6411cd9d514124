"""Megatron-LM (Megatron Core 0.16): flags of pretrain_gpt.py, both ways."""

from hp_tool.formats.megatron_lm.read import read
from hp_tool.formats.megatron_lm.write import command, flags, slurm, yaml, yaml_content

__all__ = ["command", "flags", "read", "slurm", "yaml", "yaml_content"]
