"""Read and write arguments of Megatron-LM's pretrain_gpt.py (Megatron Core 0.16)."""

from hp_tool.formats.tools.megatron_lm.read import read
from hp_tool.formats.tools.megatron_lm.scripts import command, kubernetes, slurm
from hp_tool.formats.tools.megatron_lm.write import flags, loop_flags, yaml, yaml_content

__all__ = ["command", "flags", "kubernetes", "loop_flags", "read", "slurm", "yaml", "yaml_content"]
