"""Interpret bash scripts without executing them, and return the commands that they would run."""

from hp_tool.formats.shell.script import Script, read_script
from hp_tool.formats.shell.statements import SOURCED, Command, Note
from hp_tool.formats.shell.words import Word

__all__ = ["SOURCED", "Command", "Note", "Script", "Word", "read_script"]
