"""Megatron-LM (Megatron Core 0.16): flags of pretrain_gpt.py, both ways."""

from __future__ import annotations

from hp_tool.formats.megatron_lm.read import read
from hp_tool.formats.megatron_lm.write import command, flags
from hp_tool.formats.megatron_lm.yaml_file import content as yaml_content
from hp_tool.formats.megatron_lm.yaml_file import text as yaml

__all__ = ["command", "flags", "read", "yaml", "yaml_content"]
