"""Read and write arguments of Megatron-LM's pretrain_gpt.py (Megatron Core 0.16)."""

from hp_tool.formats.tools.megatron_lm.read import read_arguments
from hp_tool.formats.tools.megatron_lm.scripts import (
    kubernetes_manifest,
    slurm_script,
    torchrun_script,
)
from hp_tool.formats.tools.megatron_lm.write import flags, loop_flags, yaml_content, yaml_text

__all__ = [
    "flags",
    "kubernetes_manifest",
    "loop_flags",
    "read_arguments",
    "slurm_script",
    "torchrun_script",
    "yaml_content",
    "yaml_text",
]
