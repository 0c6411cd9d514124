"""Interpret bash scripts without executing them: the commands that would run, with expanded
words.
"""

from hp_tool.formats.shell.script import Script, read_script
from hp_tool.formats.shell.statements import SOURCED, Command, Note
from hp_tool.formats.shell.words import Word

__all__ = ["SOURCED", "Command", "Note", "Script", "Word", "read_script"]
